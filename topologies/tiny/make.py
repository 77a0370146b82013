"""Writes the untrained model of topologies/local.yaml into this directory: Qwen3, about 100,000 parameters, one token a
character. It shows that a pipeline runs; it learns little. Run it to get the same files again:

    .venv/bin/python topologies/tiny/make.py
"""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


def tokenizer() -> PreTrainedTokenizerFast:
    assert set(string.ascii_letters + string.digits + string.punctuation + " ") < set(CHARACTERS)
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def main() -> None:
    torch.manual_seed(0)
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(HERE)
    words.save_pretrained(HERE)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {HERE}")


if __name__ == "__main__":
    main()
