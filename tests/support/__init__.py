"""What tests share: servers, pages, fixtures, golden texts and the programs that write pages of the docs."""
