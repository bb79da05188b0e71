"""Makes a model of the engine tests: some million seeded weights, too small to say anything but sensitive.

    model.py FOLDER llama|windows|latents

`llama`: every layer keeps every token. `windows`: every other layer keeps the last 256 (a Gemma 3), so that vLLM has a
block table for each kind. `latents`: a token's keys and values are one latent that all heads share (a DeepSeek V2
without experts), of the size that vLLM has kernels for.

A change of any prompt token changes the greedy text within one or two tokens, so a block of the cache that is lost,
stale or swapped shows in the text. Its tokenizer writes a token per byte; texts have tokens of several letters as well, and
single bytes of which nobody can make a character, as texts of large models have now and then.
"""
import itertools
import string
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (DeepseekV2Config, DeepseekV2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast)

VOCABULARY = 2048
WINDOW = 256
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
         "initializer_range": 0.2}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def windows():
    """With a Gemma's usual weights the last token weighs so much that the text repeats it over and over."""
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=64,
                                               tie_word_embeddings=False,
                                               layer_types=["sliding_attention", "full_attention"] * 2))
    with torch.no_grad():
        model.model.embed_tokens.weight /= 16
    return model


def latents():
    """If the other tokens of a prompt were loaded, vLLM computes the last one by a different kernel. With weights
    as large as in the other models, that shows in the text."""
    shape = {**SHAPE, "num_key_value_heads": SHAPE["num_attention_heads"], "head_dim": 64}
    model = DeepseekV2ForCausalLM(DeepseekV2Config(
        **shape, first_k_dense_replace=SHAPE["num_hidden_layers"], kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else 0.03)
    return model


def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = ("".join(some) for count in (2, 3) for some in itertools.product(string.ascii_lowercase, repeat=count))
    words = [*alphabet, *itertools.islice(letters, VOCABULARY - len(alphabet))]
    bytewise = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    made.chat_template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant: "
    return made


def main(folder, kind):
    torch.manual_seed(7)
    {"llama": llama, "windows": windows, "latents": latents}[kind]().to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
