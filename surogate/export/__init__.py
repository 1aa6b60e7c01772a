"""Writing what others read: Hugging Face models, PEFT adapters, merged models.

One idea: tensors are described first and asked for one by one, so that a model is never in memory a second time.
"""
