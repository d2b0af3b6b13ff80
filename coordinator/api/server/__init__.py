"""What every request meets, whatever it asks for.

`server` listens; a `connection` has one of the `places`. `middleware` traces a request, has its
caller identified and charged (`callers`), and turns every failure into an error of the API
(`errors`). It also labels answers and says which web pages may ask.
"""
