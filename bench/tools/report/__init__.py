"""The static site of `spbench report`: reading the results, making pages of them, and writing the files."""
