SELECT customers.name, count(*) AS orders, sum(orders.cents)::bigint AS cents
FROM {{ source('raw', 'orders') }} AS orders
JOIN {{ source('raw', 'customers') }} AS customers ON customers.id = orders.customer
GROUP BY customers.name
ORDER BY customers.name
