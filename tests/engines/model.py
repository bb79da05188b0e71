"""Makes the model of the engine tests: a Llama of 3.4 million seeded weights, too small to say anything but sensitive.

    model.py FOLDER

A change of any prompt token changes the greedy text within one or two tokens, so a block of the cache that is lost,
stale or swapped shows in the text.
"""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048


def main(folder):
    torch.manual_seed(7)
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=4096,
                         initializer_range=0.2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
