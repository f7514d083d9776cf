"""Tokens that are numbers already."""


class NullTokenizer:
    """`vocab_size` numbers, and one for the end of a document."""

    def __init__(self, vocab_size):
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.unique_identifiers = {"class": "NullTokenizer", "vocab_size": vocab_size}


def build_tokenizer(args):
    """Sets `args.padded_vocab_size`, which every tensor-parallel rank has an equal share of."""
    if args.tokenizer_type != "NullTokenizer":
        raise NotImplementedError(f"{args.tokenizer_type} tokenizer is not implemented.")
    tokenizer = NullTokenizer(args.vocab_size)
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-tokenizer.vocab_size // multiple) * multiple
    return tokenizer
