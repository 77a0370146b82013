"""The demo's model: a Qwen3 decoder of 0.4 million parameters and a tokenizer of 64 characters."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
PAD, BOS, EOS, UNK = range(4)
# 60 characters and four special tokens: every id that the model can sample is a token.
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=():;,.>? !'\"#&_%@$|"
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL.values(), *CHARACTERS])}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; a text begins with `<bos>`."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def build_config() -> Qwen3Config:
    """Two layers of width 128. The RoPE base fits texts of a dozen tokens."""
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )


def build_model() -> Qwen3ForCausalLM:
    """Weights drawn from torch's global generator, in float32."""
    return Qwen3ForCausalLM(build_config())
