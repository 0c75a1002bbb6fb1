import pytest
from tiny_chat import ALWAYS_THINKS, CHATML, DROPS_THINKING, HARMONY, TAGGED, THINKING, WITH_BOS, chat_tokenizer

from specdraft.config import SpecdraftError
from specdraft.data.chat import ChatFormat, Sample, tokenizer_fingerprint
from specdraft.data.conversations import Answer, Conversation, RowError, parse_row

USER = {"role": "user", "content": "what is two and two?"}
FOUR = {"role": "assistant", "content": "four"}
MORE = {"role": "user", "content": "the capital of France?"}
PARIS = {"role": "assistant", "content": "Paris is the capital."}


def samples(chats: ChatFormat, *messages: dict, **row) -> list[Sample]:
    return chats.samples(parse_row({"messages": list(messages), **row}))


def written(chats: ChatFormat, sample: Sample) -> list[str]:
    """The texts of the runs of supervised tokens."""
    runs: list[list[int]] = []
    before = False
    for id, supervised in zip(*sample, strict=True):
        if supervised:
            runs = runs if before else [*runs, []]
            runs[-1].append(id)
        before = supervised
    return [chats.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_d02_d03_d11_every_answer_and_its_end_and_nothing_else(template):
    chats = ChatFormat(chat_tokenizer(template))
    (sample,) = samples(chats, USER, FOUR, MORE, PARIS)
    assert written(chats, sample) == ["four<|im_end|>", "Paris is the capital.<|im_end|>"]


@pytest.mark.parametrize(("template", "bos"), [(CHATML, False), (TAGGED, False), (WITH_BOS, True)])
def test_d13_ids_are_those_of_apply_chat_template(template, bos):
    tokenizer = chat_tokenizer(template, bos=bos)
    chats = ChatFormat(tokenizer)
    (sample,) = samples(chats, USER, FOUR, MORE, PARIS)
    want = tokenizer.apply_chat_template([USER, FOUR, MORE, PARIS], tokenize=True)["input_ids"]
    assert sample.ids == want
    prompt = chats.prompt_ids([USER])
    assert prompt == tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    if bos:
        assert sample.ids.count(tokenizer.bos_token_id) == prompt.count(tokenizer.bos_token_id) == 1
        assert sample.ids[0] == prompt[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_d07_every_turn_is_its_serving_prompt_and_what_was_emitted(thinking, turns):
    chats = ChatFormat(chat_tokenizer(THINKING), {"enable_thinking": thinking})
    answers = [{"role": "assistant", "content": f"answer {n}"} for n in range(turns)]
    if thinking:
        answers = [{**answer, "reasoning_content": "two and two"} for answer in answers]
    messages = [message for answer in answers for message in (USER, answer)]
    found = samples(chats, *messages)
    emitted = ["<think>\ntwo and two\n</think>\n\n" if thinking else ""] * turns
    seen = []
    for number in range(turns):
        prompt = chats.prompt_ids(messages[: 2 * number + 1])
        answer = chats.tokenizer(f"{emitted[number]}answer {number}<|im_end|>", add_special_tokens=False)["input_ids"]
        seen += [s for s in found if s.ids[: len(prompt) + len(answer)] == prompt + answer]
        assert all(seen[-1].supervised[len(prompt) : len(prompt) + len(answer)])
    assert len(seen) == turns
    assert sum(len(written(chats, sample)) for sample in found) == turns


def test_d07_reasoning_in_a_mode_that_serves_none_is_a_fault():
    chats = ChatFormat(chat_tokenizer(THINKING), {"enable_thinking": False})
    with pytest.raises(RowError, match="does not begin with what serving sends"):
        samples(chats, USER, {**FOUR, "reasoning_content": "two and two"})


@pytest.mark.parametrize("template", [ALWAYS_THINKS, DROPS_THINKING])
def test_d08_the_answer_has_one_think_block_with_its_reasoning(template):
    chats = ChatFormat(chat_tokenizer(template))
    answer = {"role": "assistant", "content": "2+2 is 4.\n</think>\n\n4."}
    (sample,) = samples(chats, USER, answer)
    text = chats.tokenizer.decode(sample.ids)
    assert text.count("<think>") == text.count("</think>") == 1
    assert written(chats, sample) == ["2+2 is 4.\n</think>\n\n4.<|im_end|>"]
    history = chats.tokenizer.decode(chats.prompt_ids([USER, answer, MORE]))
    assert "<think>\n\n</think>" not in history
    assert history.count("<think>") == history.count("</think>") + 1


def test_d10_reasoning_and_tools_are_rendered_as_a_whole_chat():
    chats = ChatFormat(chat_tokenizer(THINKING))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "system", "content": "be brief"}, USER, {**FOUR, "reasoning_content": "two twice"}]
    (sample,) = samples(chats, *messages, tools=tools)
    assert sample.ids == chats.tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    assert written(chats, sample) == ["<think>\ntwo twice\n</think>\n\nfour<|im_end|>"]
    assert chats.tokenizer.decode(sample.ids).count("Tools:") == 1


def test_d11_three_runs_in_a_chat_with_tool_calls():
    chats = ChatFormat(chat_tokenizer(THINKING), {"enable_thinking": True})
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    found = samples(
        chats,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "use the tool"},
        {"role": "tool", "content": "4"},
        {**FOUR, "reasoning_content": "so four"},
        MORE,
        {**PARIS, "reasoning_content": "France"},
    )
    runs = [run for sample in found for run in written(chats, sample)]
    assert len(runs) == 3
    assert all(run.endswith("<|im_end|>") for run in runs)
    assert '{"a": 2, "b": 2}' in runs[0]
    assert not any("tool_response" in run for run in runs)


def test_d25_both_channels_and_every_closing_variant():
    tokenizer = chat_tokenizer(HARMONY, end="<|return|>")
    call = tokenizer.convert_tokens_to_ids("<|call|>")
    chats = ChatFormat(tokenizer, end_ids=[tokenizer.eos_token_id, call])
    (sample,) = samples(chats, USER, {**FOUR, "thinking": "two and two"})
    assert written(chats, sample) == [
        "<|channel|>analysis<|message|>two and two<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"
    ]
    tool = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    (sample,) = samples(chats, USER, {"role": "assistant", "content": "", "thinking": "add", "tool_calls": [tool]})
    assert written(chats, sample)[0].endswith('<|message|>{"a": 2}<|call|>')


def test_d18_three_formats_give_the_same_ids_and_masks():
    tokenizer = chat_tokenizer()
    chats = ChatFormat(tokenizer)
    messages = [USER, FOUR, MORE, PARIS]
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in messages]
    rows = [
        {"messages": messages},
        {"conversations": sharegpt},
        {"text": tokenizer.apply_chat_template(messages, tokenize=False)},
    ]
    one, two, three = (chats.samples(parse_row(row)) for row in rows)
    assert one == two == three
    assert sum(one[0].supervised) > 0


def test_d05_a_text_of_another_family_names_the_header_and_shows_itself():
    chats = ChatFormat(chat_tokenizer())
    text = "<role>USER</role>hi<role>ASSISTANT</role>hello"
    with pytest.raises(RowError, match=r"no supervised token") as caught:
        chats.samples(parse_row({"text": text}))
    assert repr("<|im_start|>assistant\n") in str(caught.value)
    assert text in str(caught.value)


def test_d03_a_tokenizer_without_a_template_is_named():
    with pytest.raises(SpecdraftError, match="tiny-chat has no chat template"):
        ChatFormat(chat_tokenizer(None))


def test_d03_a_template_that_drops_the_answer_is_named_and_shown():
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(SpecdraftError, match=r"tiny-chat does not render an assistant's words.*'hello'"):
        ChatFormat(chat_tokenizer(silent))


def test_a_variable_that_the_template_does_not_read_is_refused():
    with pytest.raises(SpecdraftError, match="does not read 'enable_thinking'"):
        ChatFormat(chat_tokenizer(), {"enable_thinking": True})


def test_d16_a_template_that_refuses_a_chat_gives_a_row_fault():
    refusing = CHATML.replace(
        "{% for", "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}{% for", 1
    )
    chats = ChatFormat(chat_tokenizer(refusing))
    with pytest.raises(RowError, match="tiny-chat: too long"):
        samples(chats, USER, FOUR, MORE, PARIS)


def test_a_token_across_the_border_never_enters_the_prompt():
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chats = ChatFormat(chat_tokenizer(bare))
    joint = chats.tokenizer("what is the capi")["input_ids"]
    prompt = chats.prompt_ids([{"role": "user", "content": "what is the ca"}])
    assert joint[: len(prompt)] != prompt
    (sample,) = samples(chats, {"role": "user", "content": "what is the ca"}, {"role": "assistant", "content": "pi"})
    assert sample.ids[: len(prompt)] == prompt
    assert written(chats, sample) == ["pi"]


def test_answers_of_a_target_are_its_ids_and_not_tokenised_again():
    tokenizer = chat_tokenizer()
    chats = ChatFormat(tokenizer)
    prompt = chats.prompt_ids([USER])
    odd = [*(tokenizer.convert_tokens_to_ids(letter) for letter in "four"), tokenizer.eos_token_id]
    assert tokenizer("four")["input_ids"] != odd[:-1]
    by = {"tokenizer": tokenizer_fingerprint(tokenizer)}
    chat = Conversation("k", "f:1", [USER, FOUR], answers=(Answer(1, prompt, odd, "end"),), written_by=by)
    assert chats.samples(chat) == [Sample(prompt + odd, [False] * len(prompt) + [True] * len(odd))]
    other = Conversation("k", "f:1", [USER, FOUR], answers=chat.answers, written_by={"tokenizer": "other"})
    with pytest.raises(SpecdraftError, match="f:1: its answers are ids of another tokenizer"):
        chats.samples(other)
