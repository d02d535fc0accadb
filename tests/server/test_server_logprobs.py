"""Joined, the tokens of log-probabilities give the text, and their bytes its bytes, for every kind of tokenizer."""

from itertools import accumulate

import pytest
from http_server import events, served
from scripted_model import save_spelling

from gearbx_mlx.server.logprobs import SYMBOLS

BYTEWISE = {byte: symbol for symbol, byte in SYMBOLS.items()}


def bytewise(*parts):
    return ["".join(BYTEWISE[byte] for byte in part) for part in parts]


REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
LLAMA = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
STRIPPED = {"type": "Sequence", "decoders": [*LLAMA, STRIP]}
BYTES = ["<0xC3>", "<0xBC>", "ße", "▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁!", "\n", "▁▁x"]
SMILE = " Gr\u00fc\u00dfe \U0001f642 !\n  x"
KINDS = {
    "sentencepiece": (["\u2581Gr", *BYTES], STRIPPED, SMILE[1:]),
    "sentencepiece that keeps the first space": (["\u2581Gr", *BYTES], {"type": "Sequence", "decoders": LLAMA}, SMILE),
    "first spaces": (["\u2581", "\u2581Gr", "\u2581ab", "cd"], STRIPPED, "Gr abcd"),
    "byte pairs": (
        bytewise(b" Gr", b"\xc3", b"\xbc", b"\xc3\x9fe", b" ", b"\xf0\x9f", b"\x99\x82", b" !", b"\n", b"  x"),
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        SMILE[1:],
    ),
    "metaspace": (
        ["\u2581Hello", "\u2581wor", "ld", "\u2581!"],
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "Hello world !",
    ),
    "cut within a character": (["\u2581a", "<0xC3>"], STRIPPED, "a\ufffd"),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_join_to_output_and_bytes(tmp_path, kind):
    pieces, decoder, text = KINDS[kind]
    save_spelling(tmp_path / "model", pieces, decoder)
    body = {"max_tokens": 24, "logprobs": True, "temperature": 0}
    with served(model=str(tmp_path / "model"), gears="16", log_level="ERROR") as client:
        ask = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1, **body}
        choice = client.post("/v1/chat/completions", json=ask).json()["choices"][0]
        assert choice["message"]["content"] == text
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == text
        whole = text.replace("\ufffd", "").encode() + (b"\xc3" if "\ufffd" in text else b"")
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == whole
        for entry in entries[:-1]:
            assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]

        chunks = events(client, "/v1/completions", **body | {"prompt": [0], "logprobs": 1})
        parts = [chunk["choices"][0] for chunk in chunks]
        whole = client.post("/v1/completions", json=body | {"prompt": [0], "logprobs": 1}).json()["choices"][0]
        assert "".join(part["text"] for part in parts) == whole["text"] == text
        found = whole["logprobs"]
        streamed = {name: [one for part in parts for one in part["logprobs"][name]] for name in found}
        assert streamed.pop("token_logprobs") == pytest.approx(found["token_logprobs"], abs=1e-6)
        assert [streamed[name] for name in ("tokens", "text_offset")] == [found["tokens"], found["text_offset"]]
        assert {len(values) for values in found.values()} == {len(streamed["top_logprobs"])}
        assert "".join(found["tokens"]) == text
        assert found["text_offset"] == [*accumulate(map(len, found["tokens"]), initial=0)][:-1]
