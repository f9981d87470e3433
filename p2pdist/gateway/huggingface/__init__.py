"""The interface of a Hugging Face hub, as clients of models and data sets speak it."""
