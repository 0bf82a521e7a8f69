"""Tokenizers: loading a model's own, and the character tokenizer of the embedded model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from configs.errors import InputError

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY_SIZE = 128  # a round number for the embedding; the ids without a character decode to nothing a prompt can hold


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or a Hugging Face name. Raises InputError, naming ``path``, where there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        folder = Path(path).is_dir()
        missing = (
            "no tokenizer could be loaded from it" if folder else "no such folder, and no tokenizer of that name could be loaded"
        )
        first_line = str(error).split("\n", 1)[0]
        raise InputError(f"model.path={path}: {missing}: {first_line}") from error


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: printable ASCII, newline and tab, which all come back unchanged; anything else is ``<unk>``.

    It adds no special tokens by itself: the begin token is the prompt's business (``rollout.prompts``).
    """
    characters = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    unused = [f"<unused_{place}>" for place in range(VOCABULARY_SIZE - len(SPECIALS) - len(characters))]
    vocabulary = {token: place for place, token in enumerate([*SPECIALS, *characters, *unused])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
