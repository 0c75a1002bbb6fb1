import json

import pytest

from specdraft.config import SpecdraftError
from specdraft.data import conversations
from specdraft.data.conversations import Faults, RowError, parse_row, read_conversations, sources_digest

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def read(path, strict=False):
    faults = Faults()
    found = list(read_conversations([str(path)], faults))
    faults.check(strict)
    return found, faults


def roles(*names):
    return {"messages": [{"role": name, "content": "words"} for name in names]}


def test_d15_unusable_rows_are_counted_by_reason(tmp_path):
    path = tmp_path / "chats.jsonl"
    bad = [{"conversations": []}, roles("assistant", "user"), roles("system"), {"conversations": None}]
    path.write_text("\n".join(json.dumps(row) for row in [GOOD, *bad, GOOD]))
    found, faults = read(path)
    assert [chat.messages for chat in found] == [GOOD["messages"]] * 2
    assert [chat.where for chat in found] == [f"{path}:1", f"{path}:6"]
    assert faults.counts == {
        "empty conversation": 1,
        "begins with assistant": 1,
        "no user turn": 1,
        "conversations is not a list": 1,
    }
    with pytest.raises(SpecdraftError) as caught:
        read(path, strict=True)
    for line in (2, 3, 4, 5):
        assert f"{path}:{line}: " in str(caught.value)


def test_d16_roles_that_do_not_alternate_are_skipped():
    for names in (("user", "user", "assistant"), ("user", "assistant", "assistant"), ("user", "tool")):
        with pytest.raises(RowError, match="roles do not alternate: message"):
            parse_row(roles(*names))
    assert len(parse_row(roles("system", "user", "assistant", "tool", "tool", "assistant", "user")).messages) == 7


def test_d18_sharegpt_openai_and_turns():
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    assert parse_row(sharegpt).messages == parse_row(GOOD).messages
    assert parse_row(sharegpt).key == parse_row(GOOD).key
    turns = parse_row({"turns": ["one", "two"], "category": "math"})
    assert [message["content"] for message in turns.messages] == ["one", "two"]
    assert turns.category == "math"
    assert parse_row({"prompt": "one"}).messages == turns.messages[:1]
    assert parse_row({"text": "rendered"}).text == "rendered"
    with pytest.raises(RowError, match="unknown role: 'narrator' in message 0; known are system"):
        parse_row(roles("narrator"))
    with pytest.raises(RowError, match="the row has answer, question"):
        parse_row({"question": "?", "answer": "!"})


def test_content_parts_tool_arguments_and_missing_fields():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why", "name": None},
        ],
        "tools": '[{"type": "function"}]',
    }
    chat = parse_row(row)
    assert chat.messages[0]["content"] == "one two"
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "why",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert chat.tools == [{"type": "function"}]
    for content in (None, 3, [{"type": "image"}]):
        with pytest.raises(RowError, match="content that is not text"):
            parse_row({"messages": [{"role": "user", "content": content}]})


def test_d27_bom_crlf_and_blank_lines_are_tolerated(tmp_path):
    path = tmp_path / "chats.jsonl"
    line = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line + b"\r\n" + line)
    found, faults = read(path, strict=True)
    assert len(found) == 3
    assert not faults.counts
    assert [chat.where.rpartition(":")[2] for chat in found] == ["1", "4", "5"]


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        (json.dumps(GOOD).encode()[:-9], "not valid JSON"),
        (b'{"prompt": "a\0b"}', "not valid JSON"),
        (b'{"prompt": "a", "score": NaN}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid Unicode"),
        (b"[1]", "not a JSON object"),
        (b'{"prompt": "' + b"x" * 5000 + b'"}', "line too long"),
        (b"[" * 100_000, "line too long"),
    ],
)
def test_d27_a_malformed_line_is_named_and_skipped(tmp_path, monkeypatch, defect, reason):
    monkeypatch.setattr(conversations, "LONGEST_LINE", 4000)
    path = tmp_path / "chats.jsonl"
    line = json.dumps(GOOD).encode()
    path.write_bytes(line + b"\n" + defect + b"\n" + line)
    found, faults = read(path)
    assert len(found) == 2
    assert faults.counts == {reason: 1}
    assert faults.shown[0].startswith(f"{path}:2: {reason}")
    with pytest.raises(SpecdraftError, match=f"{path}:2: "):
        read(path, strict=True)


def test_equal_rows_have_keys_of_their_own(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(3 * (json.dumps(GOOD) + "\n"))
    keys = [chat.key for chat in read(path)[0]]
    assert len(set(keys)) == 3
    assert keys[1] == keys[0] + "-2"


def test_a_dataset_folder_is_a_source(tmp_path):
    from datasets import Dataset, DatasetDict

    folder = str(tmp_path / "data")
    DatasetDict({"test": Dataset.from_list([{**GOOD, "category": None}])}).save_to_disk(folder)
    (found,), _ = read(f"{folder}#test")
    assert found.messages == GOOD["messages"]
    assert sources_digest([f"{folder}#test"]) == sources_digest([f"{folder}#test"])
    with pytest.raises(SpecdraftError, match="cannot read"):
        read(f"{folder}#train")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SpecdraftError, match=r"no such file: .*gone\.jsonl"):
        read(tmp_path / "gone.jsonl")
