"""The static site of `spbench report`: what is gathered, its pages, and how they are written."""
