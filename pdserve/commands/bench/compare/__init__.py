"""`pdserve bench compare`: which mode serves most requests within their promises."""
