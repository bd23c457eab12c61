"""`deltaforge demo`: the whole platform on real servers, live changes and a proof of delivery."""
