"""What is kept between requests: responses, conversations, and orders of background responses.

`store` has it in bounded memory (`stored`, on `shelves`) and, encoded by `saved_entries`, in what
is behind that (`backing`): a `store_file`, or the tables that coordinators share (`shared`), both
through `write_behind`. `opening` says which. An `order` is what a background response can be made
again from.
"""
