#!/usr/bin/env python3
"""Two vLLM engines on one GPU, a prefill and a decode, between which Troupe moves the cache of one prompt at a time.

    gpu_pair.py [--push] [--lengths 8,512,2048,8192] [--rounds 13] [--step TOKENS] [--model FOLDER]

Pull: the prefill engine is asked, then the decode engine with what it answers. Push: both are asked at once, and each
layer moves when the GPU has computed it. Prints, by length, milliseconds (median / greatest) of one token by the prefill
engine, and of 8 tokens of text: by the decode engine alone, by it when it loads, and from the question to the end of both.
The first three rounds of each length are not counted. The model is made if it is missing: seeded, 64 KiB of cache a token.
Wants vLLM with CUDA, and TROUPE_LIBRARY and TROUPE_COMMAND of a build with -DTROUPE_GPU=cuda.
"""
import argparse
import multiprocessing
import os
import pathlib
import random
import statistics
import tempfile
import time

from troupe.hand_off import KEY, VERSION, new_transfer, source_params

TOKENS_OUT = 8
WARM_UP = 3
VOCABULARY = 4096
START_SECONDS, ASK_SECONDS = 240, 120
SEND = {"do_remote_decode": True, "do_remote_prefill": False}


def make_model(folder):
    # pylint: disable=import-outside-toplevel
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=2048, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, vocab_size=VOCABULARY, max_position_embeddings=16384))
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else 0.03)
    model.cpu().save_pretrained(folder)


def engine(name, asked, jobs, answers):
    """A process. Every answer: seconds, token ids, and what the engine says of its cache."""
    # pylint: disable=import-outside-toplevel
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1",
                      VLLM_LOGGING_LEVEL="WARNING")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="TroupeConnector", kv_connector_module_path="troupe.vllm", kv_role="kv_both",
                                engine_id=name, kv_connector_extra_config={"read_mode": not asked.push})
    llm = LLM(model=str(asked.model), skip_tokenizer_init=True, enforce_eager=True, gpu_memory_utilization=0.2,
              max_model_len=16384, max_num_batched_tokens=asked.step, enable_prefix_caching=False, disable_log_stats=True,
              kv_transfer_config=transfer)
    answers.put("up")
    for prompt, tokens, params in iter(jobs.get, None):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                                  extra_args={"kv_transfer_params": params} if params else None)
        began = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        answers.put((time.perf_counter() - began, list(output.outputs[0].token_ids), output.kv_transfer_params))


class Engines:
    """The two processes."""

    def __init__(self, asked):
        context = multiprocessing.get_context("spawn")
        if not asked.model.is_dir():
            maker = context.Process(target=make_model, args=(asked.model,))
            maker.start()
            maker.join()
        self._engines = {}
        for name in ("prefill", "decode"):
            jobs, answers = context.Queue(), context.Queue()
            process = context.Process(target=engine, args=(name, asked, jobs, answers), daemon=True)
            process.start()
            answers.get(timeout=START_SECONDS)
            self._engines[name] = jobs, answers, process

    def begin(self, name, prompt, tokens, params=None):
        self._engines[name][0].put((prompt, tokens, params))

    def answer(self, name):
        return self._engines[name][1].get(timeout=ASK_SECONDS)

    def ask(self, name, *job):
        self.begin(name, *job)
        return self.answer(name)

    def end(self):
        for jobs, _, process in self._engines.values():
            jobs.put(None)
            process.join(10)
            process.kill()


def pulled(engines, prompt):
    prefill = engines.ask("prefill", prompt, 1, dict(SEND))
    return prefill, engines.ask("decode", prompt, TOKENS_OUT, prefill[2])


def pushed(engines, prompt, name):
    engines.begin("decode", prompt, TOKENS_OUT, source_params(name, ["engines.prefill.0"], engine_id="prefill"))
    engines.begin("prefill", prompt, 1, {**SEND, KEY: {"v": VERSION, "request": name}})
    return engines.answer("prefill"), engines.answer("decode")


def measure(engines, asked, length, chance):
    times, equal = {"prefill": [], "alone": [], "loads": [], "both": []}, 0
    for number in range(asked.rounds):
        prompt = [chance.randrange(VOCABULARY) for _ in range(length)]
        alone = engines.ask("decode", prompt, TOKENS_OUT)
        began = time.perf_counter()
        prefill, decode = pushed(engines, prompt, new_transfer("engines.prefill.0")) if asked.push \
            else pulled(engines, prompt)
        both = time.perf_counter() - began
        equal += decode[1] == alone[1]
        if number >= WARM_UP:
            for name, seconds in (("prefill", prefill[0]), ("alone", alone[0]), ("loads", decode[0]), ("both", both)):
                times[name].append(1e3 * seconds)
    row = ", ".join(f"{name} {statistics.median(of):.1f} / {max(of):.1f}" for name, of in times.items())
    print(f"{'push' if asked.push else 'pull'} {length} tokens: {row} ms, {equal} of {asked.rounds} texts equal", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--push", action="store_true")
    parser.add_argument("--lengths", default="8,512,2048,8192")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--step", type=int, default=16384, help="tokens that an engine computes at once")
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "troupe-model")
    asked = parser.parse_args()
    engines = Engines(asked)
    chance = random.Random(5)
    for length in map(int, asked.lengths.split(",")):
        measure(engines, asked, length, chance)
    engines.end()


if __name__ == "__main__":
    main()
