"""Operations that move pixels."""
