"""What runs in vLLM's own environment, with nothing but vLLM: prompts in, answers and counters out.

    python -I served_worker.py JOB.json REPLIES.json

JOB: `llm` (arguments of vllm.LLM), `prompts` (token ids), `batch_size`, `max_new_tokens`, `end_ids`. REPLIES:
`version`, `answers` (token ids), and `counters`: how they stood before the first batch and after each. -I, so that no
module of this folder stands in for one of the standard library.
"""

import json
import os
import sys
from pathlib import Path

PREFIX = "vllm:spec_decode_num_"


def main(job: dict, replies: Path) -> None:
    import vllm

    llm = vllm.LLM(**job["llm"])
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["end_ids"],
        ignore_eos=True,  # these ids end an answer and no others, as here
        detokenize=False,
    )
    answers, counters = [], [_counters(llm)]
    for start in range(0, len(job["prompts"]), job["batch_size"]):  # the counters then say which batch they are of
        batch = [{"prompt_token_ids": prompt} for prompt in job["prompts"][start : start + job["batch_size"]]]
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
        counters.append(_counters(llm))
    replies.write_text(json.dumps({"version": vllm.__version__, "answers": answers, "counters": counters}))


def _counters(llm) -> dict:  # type: ignore[no-untyped-def]
    """Every speculative counter by the end of its name, a number, or a list by position."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            by_position = metric.name.endswith("_per_pos")
            found[metric.name.removeprefix(PREFIX)] = metric.values if by_position else metric.value
    return found


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB: one request at a time
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
