"""The programs of fsq that `qworker` brings with `fsq:`; their exit statuses are fsq's: 0, 100 for wrong usage, 111 for the rest."""
