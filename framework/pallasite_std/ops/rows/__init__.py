"""Operations on rows: norms, softmax cross-entropy, quantisation, rotary embedding, gated units."""
