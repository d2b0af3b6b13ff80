"""What is kept between requests: responses, conversations, and orders of background responses.

`store` has all of it in bounded memory (`stored`) and, encoded by `saved_entries`, in a
`store_file`; `opening` says which. An `order` is what a background response can be made again from.
"""
