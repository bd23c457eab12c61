CREATE TABLE products (
    id bigint AUTO_INCREMENT PRIMARY KEY,
    name varchar(40) NOT NULL,
    amount int NOT NULL,
    changed_at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP
);
INSERT INTO products (name, amount) VALUES ('apples', 100), ('pears', 100), ('plums', 100), ('nuts', 100);
GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO stock;
-- Something is sold or delivered every second.
CREATE EVENT trade ON SCHEDULE EVERY 1 SECOND DO
    UPDATE products SET amount = IF(amount < 10, 100, amount - 1 - FLOOR(RAND() * 9)) WHERE id = 1 + FLOOR(RAND() * 4);
