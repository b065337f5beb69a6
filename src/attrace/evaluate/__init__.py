"""Attribution and predictions -> numbers.  One file per measure."""
