"""Models from Hugging Face's config.json: each module here has the classes of families (``model_type``)."""
