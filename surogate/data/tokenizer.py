"""The tokenizer of a Hugging Face directory, on the ``tokenizers`` library and Jinja alone.

Importing transformers costs more than the whole start of a run may, so its two relevant parts are done here: reading
the tokenizer's files, and ``apply_chat_template``. Both must agree with it id by id and character by character.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from surogate.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from surogate.data.template import ChatTemplate, Rendering

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


class Encoded(NamedTuple):
    """Token ids of a text, and for each the half-open range of characters that it stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    Nothing but small JSON files is read before a text is encoded or an id asked for: a run whose data are cached starts
    without the vocabulary.

    Args:
        directory: folder with ``tokenizer.json``; ``tokenizer_config.json``, ``special_tokens_map.json`` and
            ``chat_template.jinja`` are read where present.
        announce: called with one line when transformers has to be asked because there is no ``tokenizer.json``.

    Raises:
        UserError: no tokenizer there, or a file that is no JSON.
    """

    def __init__(self, directory: str | Path, announce: Callable[[str], None] | None = None) -> None:
        self.directory = Path(directory)
        self._announce = announce or (lambda _: None)
        if not self.directory.is_dir():
            raise UserError("there is no such folder", where=str(directory), expected="a folder with tokenizer.json")
        self.config = self._json("tokenizer_config.json")
        older = self._json("special_tokens_map.json")
        self._named = {}
        for name in _NAMED_TOKENS:
            token = self.config.get(name) or older.get(name)
            if isinstance(token, Mapping):
                token = token.get("content")
            if isinstance(token, str):
                self._named[name] = token
        self._templates = self._read_templates()
        self._template_where = str(self.directory)
        self._compiled: dict[str, ChatTemplate] = {}
        self._named_template = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.template_choice: str | None = None
        """What :meth:`use_chat_template` was given; ``None``: the template is the tokenizer's own."""

    @classmethod
    def load(cls, directory: str | Path, announce: Callable[[str], None] | None = None) -> Tokenizer:
        """Return the tokenizer of ``directory``, or of a ``.gguf`` file, from whose metadata the files are made."""
        if not str(directory).endswith(".gguf") or not Path(directory).is_file():
            return cls(directory, announce)
        from surogate.io.gguf_file import GGUFFile
        from surogate.io.gguf_tokenizer import write_tokenizer_files

        scratch = tempfile.TemporaryDirectory(prefix="surogate-tokenizer-")
        write_tokenizer_files(GGUFFile(Path(directory)), Path(scratch.name))
        tokenizer = cls(scratch.name, announce)
        tokenizer._scratch = scratch  # removed with the tokenizer
        return tokenizer

    def _json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"not valid JSON ({error})", where=str(path)) from None
        return value if isinstance(value, dict) else {}

    def _read_templates(self) -> dict[str, str]:
        templates: dict[str, str] = {}
        configured = self.config.get("chat_template") or self._json("chat_template.json").get("chat_template")
        if isinstance(configured, str):
            templates["default"] = configured
        elif isinstance(configured, list):
            templates.update({entry["name"]: entry["template"] for entry in configured})
        elif isinstance(configured, dict):
            templates.update(configured)
        main = self.directory / "chat_template.jinja"
        extra = sorted((self.directory / "additional_chat_templates").glob("*.jinja"))
        if main.is_file() or extra:
            templates = {path.stem: path.read_text("utf-8") for path in extra}
            if main.is_file():
                templates["default"] = main.read_text("utf-8")
        return templates

    # The vocabulary

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The ``tokenizers`` object, without post-processor: it adds no special token and trims no offset."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        path = self.directory / "tokenizer.json"
        if path.is_file():
            try:
                backend = Backend.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise UserError(f"not a tokenizer file: {error}", where=str(path)) from None
        else:
            backend = self._from_transformers()
        backend.no_truncation()
        backend.no_padding()
        self._post_processor = backend.post_processor
        backend.post_processor = None
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        missing = []
        for _, entry in sorted(self.config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if entry["content"] not in known:
                flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
                missing.append(AddedToken(entry["content"], special=entry.get("special", False), **flags))
                known.add(entry["content"])
        more = self.config.get("extra_special_tokens") or self.config.get("additional_special_tokens") or []
        more = list(more.values()) if isinstance(more, Mapping) else list(more)
        for token in [*self._named.values(), *more]:
            content = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(content, str) and content not in known:
                missing.append(AddedToken(content, special=True, normalized=False))
                known.add(content)
        if missing:
            backend.add_tokens(missing)
        return backend

    def _from_transformers(self) -> tokenizers.Tokenizer:
        what = "there is no tokenizer.json"
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UserError(
                what,
                where=str(self.directory),
                expected="a folder in Hugging Face layout with tokenizer.json",
                fix="pip install transformers sentencepiece (it converts older tokenizer files)",
            ) from None
        self._announce(f"{self.directory}: no tokenizer.json; transformers converts the older tokenizer files (slow)")
        try:
            loaded = AutoTokenizer.from_pretrained(str(self.directory))
        except Exception as error:
            raise UserError(f"{what}, and transformers cannot convert what is there: {error}") from None
        backend: tokenizers.Tokenizer | None = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"{what}, and transformers has no fast form of this one", where=str(self.directory))
        return backend

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer's post-processor puts before and after a text."""
        backend = self.backend
        if self._post_processor is None:
            return [], []
        probe = backend.encode("a", add_special_tokens=False)
        count = len(probe.ids)
        whole = self._post_processor.process(probe, None, True)
        special = list(whole.special_tokens_mask)
        first = special.index(0) if 0 in special else len(special)
        return whole.ids[:first], whole.ids[first + count :]

    @property
    def prefix_ids(self) -> list[int]:
        """Ids put before a plain text, such as a BOS."""
        return self._around[0]

    @property
    def suffix_ids(self) -> list[int]:
        """Ids put after a plain text; usually none."""
        return self._around[1]

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text of each special token and its id."""
        decoder = self.backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in decoder.items() if token.special}
        for token in self._named.values():
            index = self.token_to_id(token)
            if index is not None:
                special[token] = index
        return special

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, ``None`` when there is no such token."""
        return self.backend.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        token = self._named.get(name)
        return None if token is None else self.token_to_id(token)

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, if the tokenizer names one (whether it is used is another matter)."""
        return self._named_id("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text or turn, if the tokenizer names one."""
        return self._named_id("eos_token")

    @cached_property
    def pad_id(self) -> int:
        """Id to fill unused positions with: the pad token, else EOS, else 0. No position is known by it."""
        for name in ("pad_token", "eos_token"):
            index = self._named_id(name)
            if index is not None:
                return index
        return 0

    # Text

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoded:
        """Encode ``text``.

        Args:
            text: any text; special tokens spelled in it become their ids.
            add_special_tokens: put around it what the tokenizer's post-processor puts around a text (BOS and such).
                Never for rendered chats: their template already says all.

        Returns:
            Ids and ranges of characters; tokens put around the text have the empty range at its edge.
        """
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        if add_special_tokens:
            before, after = self._around
            ids = [*before, *ids, *after]
            end = len(text)
            offsets = [*[(0, 0)] * len(before), *offsets, *[(end, end)] * len(after)]
        return Encoded(ids, offsets)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ``ids``."""
        return self.backend.decode([int(index) for index in ids], skip_special_tokens=skip_special_tokens)

    # Conversations

    @property
    def chat_template(self) -> str | None:
        """Jinja text of the chat template, ``None`` when there is none."""
        source = self._templates.get("default") or next(iter(self._templates.values()), None)
        if self._named_template and self.bos_id is not None and self.bos_id in self.prefix_ids:
            return "{{ bos_token }}" + (source or "")
        return source

    def use_chat_template(self, choice: str) -> None:
        """Replace the chat template; :meth:`save` then writes the new one.

        Args:
            choice: a name of :func:`surogate.data.named.named_templates`, or the path of a Jinja file. A named
                template gets the BOS token in front where this tokenizer puts one before every text.
        """
        from surogate.data.named import named_templates, read_template

        source, self._template_where = read_template(choice)
        self._templates, self._named_template = {"default": source}, choice in named_templates()
        self.template_choice = choice

    def template_for(self, tools: Sequence[Any] | None = None) -> ChatTemplate:
        """Return the compiled template: the one named ``tool_use`` for rows with tools, if there is one.

        Raises:
            UserError: there is no chat template.
        """
        from surogate.data.named import named_templates
        from surogate.data.template import ChatTemplate

        source = self._templates.get("tool_use") if tools is not None else None
        source = source or self.chat_template
        if source is None:
            raise UserError(
                "this tokenizer has no chat template (a base model?), and conversations need one",
                where=str(self.directory),
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                fix=f"set chat_template to one of {', '.join(named_templates())}, or to the path of a Jinja file",
            )
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self._template_where)
        return self._compiled[source]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Rendering:
        """Like :meth:`render_chat`, with the range of characters of every message."""
        everything = {
            **self._named,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return self.template_for(tools).render(messages, everything)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return what ``apply_chat_template(messages, tokenize=False, ...)`` of transformers returns.

        Args:
            messages: turns, each with ``role`` and mostly ``content``.
            tools: JSON schemas of functions.
            add_generation_prompt: end with the head of an assistant turn.
            variables: passed to the template; they win over the tokenizer's own special tokens.

        Raises:
            UserError: there is no chat template, or it is no valid Jinja.
            TemplateRefusal: the template refused the conversation.
        """
        return self.render(messages, tools, add_generation_prompt, **variables).text

    # Files

    def fingerprint(self) -> str:
        """Return a hash of everything that the ids of a text depend on: files and chat template."""
        digest = hashlib.blake2b(digest_size=16)
        for name in (*_FILES[:4], *(() if (self.directory / _FILES[0]).is_file() else _FILES[6:])):
            path = self.directory / name
            if path.is_file():
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
        digest.update(json.dumps([self._templates, self._named_template], sort_keys=True).encode())
        return digest.hexdigest()

    def save(self, directory: str | Path) -> None:
        """Copy the tokenizer's files; a template chosen with :meth:`use_chat_template` becomes the saved one."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, target / name)
        extra = self.directory / "additional_chat_templates"
        if self.template_choice is not None:
            (target / "chat_template.jinja").write_text(self.chat_template or "", "utf-8")
        elif extra.is_dir():
            shutil.copytree(extra, target / extra.name, dirs_exist_ok=True)
        if not (target / "tokenizer.json").is_file():
            written = type(self.backend).from_str(self.backend.to_str())
            if self._post_processor is not None:
                written.post_processor = self._post_processor
            written.save(str(target / "tokenizer.json"))
