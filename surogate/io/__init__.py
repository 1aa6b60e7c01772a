"""Reading what others wrote: Hugging Face directories, hub ids, safetensors, GGUF.

One idea: a model is a :class:`~surogate.io.weights.WeightSource`, a set of named tensors that are memory-mapped and
copied, converted and let go of slice by slice, so that loading costs no memory beside the place that is loaded into.
"""
