"""Models from Hugging Face's config.json: a module for each family (``model_type``), found by being there."""
