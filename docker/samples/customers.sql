WITH known AS (
    UPDATE customers SET visits = visits + 1 WHERE id = 1 + floor(random() * 50)::bigint RETURNING id
), somebody AS (
    INSERT INTO customers (name) SELECT md5(random()::text) WHERE NOT EXISTS (SELECT FROM known)
    RETURNING id
)
INSERT INTO orders (customer, total)
SELECT id, (random() * 100)::numeric(10, 2) FROM (TABLE known UNION ALL TABLE somebody) visitor \watch 1
