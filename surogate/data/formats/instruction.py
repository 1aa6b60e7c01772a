"""An instruction, perhaps an input to it, and the answer (the layout of Alpaca). Becomes a conversation."""

from __future__ import annotations

from surogate.data.formats._base import Chat, Example, Fields, Format, Row, find_field, need_field, text_of

_INSTRUCTION = ("instruction", "question", "query")
_INPUT = ("input", "context")
_OUTPUT = ("output", "response", "answer")
_SYSTEM = ("system", "system_prompt")


class Instruction(Format):
    """``instruction``, ``input`` (may be missing or empty), ``output``, and ``system`` (likewise).

    The user's turn is the instruction, with the input below it after an empty line.
    """

    name = "instruction"
    summary = "instruction, output, and perhaps input and system"
    rank = 30

    def recognise(self, row: Row, fields: Fields) -> str | None:
        ask = find_field(row, fields, "instruction_field", _INSTRUCTION)
        answer = find_field(row, fields, "output_field", _OUTPUT)
        return f"fields {ask}, {answer}" if ask and answer else None

    def convert(self, row: Row, fields: Fields) -> Example:
        ask = text_of(row, need_field(row, fields, "instruction_field", _INSTRUCTION))
        answer = text_of(row, need_field(row, fields, "output_field", _OUTPUT), empty=False)
        more, system = (
            text_of(row, name) if name is not None and row[name] is not None else ""
            for name in (
                need_field(row, fields, key, usual) if key in fields else find_field(row, fields, key, usual)
                for key, usual in (("input_field", _INPUT), ("system_field", _SYSTEM))
            )
        )
        messages = [{"role": "system", "content": system}] if system.strip() else []
        messages.append({"role": "user", "content": f"{ask}\n\n{more}" if more.strip() else ask})
        messages.append({"role": "assistant", "content": answer})
        return Chat(messages, completion_from=len(messages) - 1)


FORMAT = Instruction()
