"""The safetensors writer, under the name that exporters use. It lives in ``surogate.io`` because the conversion of
GGUF files needs it too."""

from surogate.io.safetensors_writer import (
    MAX_SHARD_BYTES,
    Tensor,
    array_tensor,
    tensor_bytes,
    write_safetensors,
    write_sharded,
)

__all__ = ["MAX_SHARD_BYTES", "Tensor", "array_tensor", "tensor_bytes", "write_safetensors", "write_sharded"]
