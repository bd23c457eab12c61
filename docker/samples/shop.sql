CREATE TABLE customers (id bigserial PRIMARY KEY, name text NOT NULL, visits int NOT NULL DEFAULT 1);
CREATE TABLE orders (
    id bigserial PRIMARY KEY,
    customer bigint NOT NULL REFERENCES customers,
    total numeric(10, 2) NOT NULL,
    ordered_at timestamptz NOT NULL DEFAULT now()
);
