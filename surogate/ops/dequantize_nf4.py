"""Weights of four bits, made whole in front of the product that reads them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import Type
from surogate.ops import nf4
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, array, expect, f32, typed
from surogate.ops.blockwise8 import table


class DequantizeNF4(Op):
    """codes[n/2] u8, absmax[ceil(n/block)], groups?, offset[1]?, table?, numbers[16] f32, y[rows,columns]? -> y.

    The n weights become the rows of y from ``first`` on. Their blocks' magnitudes ``absmax`` are f32; or u8, and then
    ``groups`` (f32, one for 256 magnitudes), ``offset`` and ``table`` (f32[512], of which 256 are the numbers) give
    them (``surogate.ops.nf4``). Operand y has the others; where
    it is left out, they are undefined.

    Attributes ``rows``, ``columns``, ``first``, ``block``: int; ``dtype``: of y, f32 or bf16.
    """

    name = "dequantize_nf4"
    inplace = {0: 6}
    transient = True

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        codes, absmax = typed(inputs[0], self, "codes"), typed(inputs[1], self, "absmax")
        y = Type((attrs["rows"], attrs["columns"]), attrs["dtype"])
        n = 2 * codes.numel
        blocks = -(-n // attrs["block"])
        expect(codes == Type((n // 2,), "u8") and attrs["dtype"] in ("f32", "bf16"), self, f"{codes} cannot be {y}")
        inside = attrs["first"] * attrs["columns"] + n <= y.numel and n % attrs["columns"] == 0
        expect(inside and attrs["first"] >= 0, self, f"{codes} do not lie in {y} from row {attrs['first']} on")
        expect(absmax.shape == (blocks,), self, f"{absmax}: {blocks} blocks of {attrs['block']}")
        nested = absmax.dtype == "u8"
        expect(nested or absmax.dtype == "f32", self, f"absmax is {absmax}")
        given = [t is not None for t in inputs[2:5]]
        expect(all(given) if nested else not any(given), self, "groups, offset and table belong to u8 magnitudes")
        if nested:
            expect(f32(inputs[2], self, "groups").shape == (-(-blocks // nf4.GROUP),), self, f"groups {inputs[2]}")
            expect(f32(inputs[3], self, "offset").shape == (1,), self, f"offset {inputs[3]}")
            expect(f32(inputs[4], self, "table").numel >= 256, self, f"table {inputs[4]}")
        expect(f32(inputs[5], self, "numbers").shape == (16,), self, f"numbers {inputs[5]}")
        expect(inputs[6] is None or inputs[6] == y, self, f"{inputs[6]} is not {y}")
        return [y]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        absmax, groups, offset, numbers = inputs[1:5]
        if groups is not None:
            absmax = nf4.magnitudes(array(absmax), groups, array(offset), array(numbers))
        weights = nf4.dequantize(array(inputs[0]), array(absmax), array(inputs[5]), attrs["block"])
        y = np.zeros((attrs["rows"], attrs["columns"])) if inputs[6] is None else np.array(inputs[6], np.float64)
        y[attrs["first"] :].reshape(-1)[: weights.size] = weights
        return [y]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        n = 2 * typed(inputs[0], self, "codes").numel
        read = sum(t.nbytes for t in inputs[:3] if t is not None)
        return Cost(n, read + n * (4 if attrs["dtype"] == "f32" else 2))

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        numbers, eight = nf4.NF4.astype(np.float64), table(True).astype(np.float64)
        for rows, columns, first, total, block, dtype in [
            (6, 64, 0, 6, 64, "f32"),
            (40, 576, 24, 72, 64, "bf16"),
            (33, 30, 1, 40, 64, "f32"),
            (8, 9, 2, 11, 32, "f32"),
            (300, 128, 0, 300, 64, "bf16"),
        ]:
            codes, absmax = nf4.quantize(rng.normal(size=rows * columns), block)
            y = rng.normal(size=(total, columns)) if total > rows else None
            attrs = {"rows": total, "columns": columns, "first": first, "block": block, "dtype": dtype}
            dtypes = ["u8", None, None, None, None, None, dtype]
            tolerance = 2e-6 if dtype == "f32" else 2.0**-8
            given = [codes, absmax.astype(np.float64), None, None, None, numbers, y]
            yield Sample(given, attrs, dtypes, rtol=tolerance, atol=0.0)
            index, groups, offset = nf4.quantize_magnitudes(absmax)
            nested = [index, groups.astype(np.float64), np.array([float(offset)]), eight]
            yield Sample([codes, *nested, numbers, y], attrs, ["u8", "u8", *dtypes[2:]], rtol=tolerance, atol=1e-6)
