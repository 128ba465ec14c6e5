"""Operations whose operands go round: each rank of a ring meets the parts of all others, one after the other."""
