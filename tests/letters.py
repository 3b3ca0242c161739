"""A tokenizer whose tokens are single bytes, so that what each token weighs can be read as text."""

from tokenizers import Tokenizer, decoders, models
from tokenizers import pre_tokenizers as splits

from tests.tiny import ADDED_TOKENS
from umm_reflect.tokens import Tokens


def letters() -> Tokens:
    alphabet = sorted(splits.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: k for k, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = splits.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ADDED_TOKENS))
    return Tokens(tokenizer)


LETTERS = letters()
