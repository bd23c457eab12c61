"""`deltaforge demo`: the whole platform on real servers, with live changes and a proof of delivery."""
