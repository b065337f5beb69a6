"""How much each token contributes to one attention block's output: the plain reference and streamed row blocks."""
