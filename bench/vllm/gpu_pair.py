#!/usr/bin/env python3
"""Two vLLM engines on one GPU or on two, a prefill and a decode; Troupe moves the cache of one prompt at a time.

    gpu_pair.py [--connector NixlConnector] [--push] [--lengths 8,512,2048,8192] [--rounds 13] [--step TOKENS]
                [--prefix-caching] [--lose] [--own-gpus] [--latents] [--cache-dtype auto|fp8] [--model FOLDER]

Handed over: the prefill engine is asked, then the decode engine with what it answers. Pushed: both are asked at once, and
each layer moves when the GPU has computed it. Prints, by length, milliseconds (median / greatest): of one token by the
prefill engine, alone and for the other one; of 8 tokens by the decode engine, alone and when it loads; and of both from the
question to the end of the text. All of these are asked in turn, in an order of its own each round; the first three rounds
of each length are not counted. After each transfer the cache of the prompt is compared, byte for byte, on both sides.
With --prefix-caching half of each prompt is that of the round before. With --lose, instead, the decode engine is stopped
and killed in the middle of transfers. With --own-gpus each engine sees a GPU that the other does not see. The model is
made if it is missing: seeded, 64 KiB of cache a token, or 18 KiB of latents (MLA) with --latents. Wants vLLM with CUDA,
and TROUPE_LIBRARY and TROUPE_COMMAND of a build with -DTROUPE_GPU=cuda.

With --connector another of vLLM's connectors moves the caches, in the same turns: NixlConnector, if its wheel is there.
What it moved is not compared byte for byte, only the texts are, and it can neither push nor be asked what its link is.
"""
import argparse
import hashlib
import multiprocessing
import os
import pathlib
import random
import signal
import statistics
import tempfile
import time

from troupe.hand_off import KEY, VERSION, new_transfer, source_params

OURS = "TroupeConnector"
NAMES = ["prefill", "decode"]
NIXL_PORT = 5600  # and 100 more for the decode engine
TOKENS_OUT = 8
WARM_UP = 3
VOCABULARY = 4096
LAYERS = 16
START_SECONDS, ASK_SECONDS = 240, 120
LOST_TOKENS = 8192
SEND = {"do_remote_decode": True, "do_remote_prefill": False}
# NixlConnector wants all of its keys.
SEND_BY_RIVAL = {**SEND, **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))}


def make_model(folder, latents):
    # pylint: disable=import-outside-toplevel
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
             "vocab_size": VOCABULARY, "max_position_embeddings": 16384}
    torch.manual_seed(7)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), torch.no_grad():
        if latents:
            model = DeepseekV2ForCausalLM(DeepseekV2Config(
                **shape, num_key_value_heads=16, head_dim=64, first_k_dense_replace=LAYERS, q_lora_rank=None))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=8, head_dim=128))
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else 0.03)
    model.cpu().save_pretrained(folder)


class LastCache:
    """Locates the cache of the last prompt that was sent or loaded, from the orders of the connector's worker."""

    def __init__(self, worker_class):
        self._caches, self._blocks, self._worker = {}, [], None
        register, carry_out, offer = worker_class.register, worker_class.carry_out, worker_class.offer

        def note_caches(worker, caches, **rest):
            self._caches, self._worker = dict(caches), worker
            register(worker, caches, **rest)

        def note_blocks(worker, step):
            for receive in step.receives:
                self._blocks = list(receive.blocks[0])
            for push in step.pushes:
                self._blocks = list(push.blocks)
            for chunk in step.chunks:
                self._blocks += chunk.blocks
            carry_out(worker, step)

        def note_offers(worker, ends):
            for send in ends.sends:
                self._blocks = list(send.blocks[0])
            offer(worker, ends)

        worker_class.register, worker_class.carry_out, worker_class.offer = note_caches, note_blocks, note_offers

    def links(self):
        """The backend of each link, and why it was chosen."""
        # pylint: disable-next=protected-access
        return ", ".join(f"{one['backend']} ({one['reason']})" for one in self._worker._engine.report()["links"])

    def digest(self, tokens):
        """A digest of the first `tokens` in every layer. No other request came since, so their blocks are unchanged."""
        # pylint: disable=import-outside-toplevel
        import torch

        torch.cuda.synchronize()
        found = hashlib.sha256()
        for cache in self._caches.values():
            blocks = cache[self._blocks]
            rows = (blocks if blocks.dim() == 3 else blocks.transpose(1, 2)).flatten(0, 1)[:tokens]
            found.update(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return found.hexdigest()


def engine(name, asked, jobs, answers):
    """The main function of an engine's process. Each answer: seconds, token ids, and the engine's report on its cache.
    """
    # pylint: disable=import-outside-toplevel
    if asked.own_gpus:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[NAMES.index(name)]
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1",
                      VLLM_LOGGING_LEVEL="WARNING")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    last = None
    if asked.connector == OURS:
        from troupe.vllm.worker import Worker

        last = LastCache(Worker)
        transfer = KVTransferConfig(kv_connector=OURS, kv_connector_module_path="troupe.vllm", kv_role="kv_both",
                                    engine_id=name, kv_connector_extra_config={"read_mode": not asked.push})
    else:
        os.environ.update(VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                          VLLM_NIXL_SIDE_CHANNEL_PORT=str(NIXL_PORT + 100 * NAMES.index(name)))
        transfer = KVTransferConfig(kv_connector=asked.connector, kv_role="kv_both")
    llm = LLM(model=str(asked.model), skip_tokenizer_init=True, enforce_eager=True, gpu_memory_utilization=0.2,
              max_model_len=16384, max_num_batched_tokens=asked.step, enable_prefix_caching=asked.prefix_caching,
              kv_cache_dtype=asked.cache_dtype, disable_log_stats=True, kv_transfer_config=transfer)
    answers.put("up")
    for job in iter(jobs.get, None):
        if isinstance(job, int):
            answers.put(last.digest(job))
            continue
        if job == "links":
            answers.put(last.links())
            continue
        prompt, tokens, params = job
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                                  extra_args={"kv_transfer_params": params} if params else None)
        began = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        answers.put((time.perf_counter() - began, list(output.outputs[0].token_ids), output.kv_transfer_params))


class Engines:
    """The two processes."""

    def __init__(self, asked):
        self._asked = asked
        self.are_ours = asked.connector == OURS
        self._context = multiprocessing.get_context("spawn")
        if not asked.model.is_dir():
            maker = self._context.Process(target=make_model, args=(asked.model, asked.latents))
            maker.start()
            maker.join()
        self._engines = {}
        for name in NAMES:
            self.start(name)

    def start(self, name):
        jobs, answers = self._context.Queue(), self._context.Queue()
        process = self._context.Process(target=engine, args=(name, self._asked, jobs, answers), daemon=True)
        process.start()
        self._engines[name] = jobs, answers, process
        self.answer(name, START_SECONDS)

    def begin(self, name, *job):
        self._engines[name][0].put(job)

    def answer(self, name, seconds=ASK_SECONDS):
        return self._engines[name][1].get(timeout=seconds)

    def ask(self, name, prompt, tokens, params=None):
        self.begin(name, prompt, tokens, params)
        return self.answer(name)

    def same_cache(self, tokens):
        """Whether both engines have the same bytes of the last prompt that moved."""
        for jobs, _, _ in self._engines.values():
            jobs.put(tokens)
        return self.answer("prefill") == self.answer("decode")

    def links(self):
        self._engines["decode"][0].put("links")
        return self.answer("decode")

    def signal(self, name, number):
        os.kill(self._engines[name][2].pid, number)

    def end(self):
        for jobs, _, process in self._engines.values():
            jobs.put(None)
            process.join(10)
            process.kill()


def handed_over(engines, prompt):
    prefill = engines.ask("prefill", prompt, 1, dict(SEND if engines.are_ours else SEND_BY_RIVAL))
    return prefill, engines.ask("decode", prompt, TOKENS_OUT, prefill[2])


def begin_push(engines, prompt):
    name = new_transfer("engines.prefill.0")
    engines.begin("decode", prompt, TOKENS_OUT, source_params(name, ["engines.prefill.0"], engine_id="prefill"))
    engines.begin("prefill", prompt, 1, {**SEND, KEY: {"v": VERSION, "request": name}})


def pushed(engines, prompt):
    begin_push(engines, prompt)
    return engines.answer("prefill"), engines.answer("decode")


class Prompts:
    def __init__(self, asked):
        self._chance = random.Random(5)
        self._shared = asked.prefix_caching

    def draw(self, length, former=()):
        kept = list(former[:length // 2]) if self._shared else []
        return kept + [self._chance.randrange(VOCABULARY) for _ in range(length - len(kept))]

    def in_turn(self, what):
        return self._chance.sample(what, len(what))


def measure(engines, asked, length, prompts):
    """Uses a prompt of its own for each way, since a cache that is already there is not moved."""
    moves = {"handed over": handed_over, **({"pushed": pushed} if asked.push else {})}
    times, equal, same = {}, 0, 0
    formers = {way: () for way in ("alone", *moves)}

    def note(what, seconds):
        times.setdefault(what, []).append(1e3 * seconds)

    for number in range(asked.rounds):
        for way in prompts.in_turn(["alone", *moves]):
            formers[way] = prompt = prompts.draw(length, formers[way])
            if way == "alone":
                seconds = {"prefill alone": engines.ask("prefill", prompt, 1)[0],
                           "decode alone": engines.ask("decode", prompt, TOKENS_OUT)[0]}
            else:
                began = time.perf_counter()
                prefill, decode = moves[way](engines, prompt)
                seconds = {f"prefill {way}": prefill[0], f"decode {way}": decode[0],
                           f"both {way}": time.perf_counter() - began}
                same += engines.are_ours and engines.same_cache(length - 1)
                equal += decode[1] == engines.ask("prefill", prompt, TOKENS_OUT)[1]
            if number >= WARM_UP:
                for what, of_it in seconds.items():
                    note(what, of_it)
    row = ", ".join(f"{name} {statistics.median(of):.1f} / {max(of):.1f}" for name, of in sorted(times.items()))
    moved = asked.rounds * len(moves)
    compared = f"the same bytes {same} of {moved}, " if engines.are_ours else ""
    print(f"{length} tokens: {row} ms; {compared}texts equal {equal} of {moved}", flush=True)
    return same == moved or not engines.are_ours


def lose(engines, asked, prompts):
    """Stops the decode engine for two seconds, then kills it, in the middle of a prompt's way; afterwards the prefill
    engine must compute as before, and a new decode engine must load correctly."""
    fine = True
    for number in range(asked.rounds):
        for what, after in (("stopped", 0.02 + 0.03 * number), ("killed", 0.02 + 0.03 * number)):
            prompt = prompts.draw(LOST_TOKENS)
            if asked.push:
                begin_push(engines, prompt)
            else:
                engines.begin("decode", prompt, TOKENS_OUT, engines.ask("prefill", prompt, 1, dict(SEND))[2])
            time.sleep(after)
            engines.signal("decode", signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
            began = time.perf_counter()
            if asked.push:
                engines.answer("prefill")
            own = engines.ask("prefill", prompt, TOKENS_OUT)
            took = time.perf_counter() - began
            if what == "stopped":
                time.sleep(2)
                engines.signal("decode", signal.SIGCONT)
                said = engines.answer("decode")[1]
                outcome = f"it went on with {'the same' if said == own[1] else 'another'} text"
                fine &= len(said) == TOKENS_OUT
            else:
                engines.start("decode")
                prompt = prompts.draw(LOST_TOKENS)
                (pushed if asked.push else handed_over)(engines, prompt)
                same = engines.same_cache(LOST_TOKENS - 1)
                outcome = f"a new one has {'the same' if same else 'other'} bytes"
                fine &= same
            print(f"decode {what} after {1e3 * after:.0f} ms: the prefill engine answered twice within {took:.2f} s; {outcome}",
                  flush=True)
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", default=OURS)
    parser.add_argument("--push", action="store_true")
    parser.add_argument("--lengths", default="8,512,2048,8192")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--step", type=int, default=16384, help="tokens that an engine computes at once")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--lose", action="store_true")
    parser.add_argument("--own-gpus", action="store_true")
    parser.add_argument("--latents", action="store_true")
    parser.add_argument("--cache-dtype", default="auto")
    parser.add_argument("--model", type=pathlib.Path)
    asked = parser.parse_args()
    if asked.connector != OURS and (asked.push or asked.lose):
        parser.error(f"--push and --lose are for {OURS} alone")
    if asked.model is None:
        asked.model = pathlib.Path(tempfile.gettempdir()) / ("troupe-latents" if asked.latents else "troupe-model")
    engines = Engines(asked)
    prompts = Prompts(asked)
    fine = lose(engines, asked, prompts) if asked.lose else all([
        measure(engines, asked, length, prompts) for length in map(int, asked.lengths.split(","))])
    if engines.are_ours:
        print(f"the link is over {engines.links()}")
    engines.end()
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
