"""A binary log that MySQL 9.7.4 wrote: what older servers cannot make.

With `binlog_row_metadata = FULL`, on a table `shop.orders (id int PRIMARY KEY, v varchar(20))`::

    SET SESSION binlog_transaction_compression = ON
    BEGIN; INSERT INTO orders VALUES (1,'a'),(2,'b'); UPDATE orders SET v='x' WHERE id=2; COMMIT
    SET gtid_next='AUTOMATIC:batch'; INSERT INTO orders VALUES (3,'c')
    SET SESSION binlog_transaction_compression = OFF; INSERT INTO orders VALUES (4,'d')
    SET gtid_next='AUTOMATIC'; SET SESSION binlog_transaction_compression = ON
    XA START 'x','y',7; INSERT INTO orders VALUES (5,'e'); XA END 'x','y',7; XA PREPARE 'x','y',7
    XA COMMIT 'x','y',7 (in another session, without compression)
    CREATE TABLE copy SELECT id FROM orders WHERE id < 3; TRUNCATE orders; FLUSH BINARY LOGS

and the beginning of the file after it.
"""

from __future__ import annotations

import base64
import struct
import zlib

from deltaforge_dagster.sources.mysql.events.binlog import FORMAT_DESCRIPTION
from deltaforge_lab.synthetic.mysql_events import packets

MAGIC = b"\xfebin"
_FILES = (
    r"""c-s4yl$p2ZIzu);BLf3NH4xV`fB*}FrJlK-iLMa?X+W5Pmw^Lf01J>zW?+%xfXFZbF&7t?mKKAM2?Lh~0|VpL`?<"""
    r"""UztCc}ky94ntAZ}n_gc_xmzRKpQmEgyz&zb%Jxr{Jz7|jNy4LpyW0vV$SlJEy&QAVu#Vd|L}&<wi!@y6`E32cAl8"""
    r"""3U3S890?RzJZL>07+i};-_GBOpFZ7%zxY&85!3yXl&L0o8ZnM%gXS`T}Gq9`x2wUM9X7KSi0QRmh8BF?w+rvi_ij"""
    r"""xwdw18n0Uf$)(UPjaXB$f^Z$N@z!yi@7hkep{$<8<w&Ra3ADn7YJA-9Qa>vtLJ5Q$53sWn@M7PeaY+t|@JL$v|h3"""
    r"""r+_HgbJ$a}~PhJa-GPvEK0Ii}^~&a8ZT@ERWs@M3}zem1NdWh+WNmULuUSHlfGEU{Xl2gN279r&y6#<eSEC4Ck0X"""
    r"""F!9^VZUp&93*?OeAT|XD08<f&@Hw}VsbVT~iPBN#P^P)eEFYOcqAV<ITuF%~$r&6hTpT?0?4QBmBcRG6)GWk3{c="""
    r"""+^JbZQn@jE71_%NPjWSjvG9fh;CEDW32rPUT__A-8`FW7&+?)(4W%Tgb1o4+$SJO6~o(d#*n??q*)&77dS)Q9oEe"""
    r"""Tsn1r~8Z7@r!hr)y&|T)2}+yMY{CNnt3a&MWXKd3YdBJS*h>m%KahLlcBrJL$F*$Ms)R#(rZs$>MBehJb&Szdsv("""
    r"""g7%oSqhJ3i7<6$rtOF&4yu33!|5O&N21A+q)5Ij8fOkW@Yu@xK;ty7ykK;|)l%<~4~PM{tR22N<I0w#Z1XgX71Sl"""
    r"""|jyvCPFKDJ=gPKv3vELvcoa0fUpPyQkmMu<rFBql7_5c>?hzu+y@j$&>}Gk}ba|CAFxSfr*))DF7JWj6l|({|qdw"""
    r"""OqnT+WgLtQJd6j{#y%AS86*cXNDGMnAQ>bGO!`d!!TFLg<*9~cG)ScYNToawOS3@KK)_Tf#V074DvJecrecR>Dn^"""
    r"""92!65zzBva{vGu6Zv@#XMDa}S6;SP_}Z8knheLo$^$LoX{s(+LHghNGE032INaad6F*G-B2^ZBuR!{`hWlw^uW#t"""
    r"""kDAJEPs`SM->bg&Hthnw2X<dS@IHdQlQb_xzG2>FJWyI3*&GwJZ<$M^1_={)hWDZ?-fcO%jJ*J&sW`I-#=?nb5~I"""
    r"""puhyv-lR~bmta>tI?Il}5|BlpM&o;94l^i|H>3ljq{P$-jVTS4^%LtaE3IZ;Vc^%^1f^9O`)H+zIqqZ_0ak!UzFz"""
    r"""%d1cjg6?11St~)i;!b;DO}}3O%sz7|{cZ0~T1YKw^c`QBk)*fwdYGR7V%aw!@QE91wqI1tlvkgcbtHDz~z@Foz++"""
    r"""QNh{Y*Vi*dAwu2ULR|+)TB_@qU$6}mLWx%=HmpvCrD7&lw9?k)7}%+QmV)DzW9mXZlswSOhU{2U@__fpP4nSKwF0"""
    r"""paIBg*rC6C`IVTfVQL9UJ=t_mTJPCl**3CZ~dl?e(OTnY*anJEbhnRz7&e*Pf}exW`-T$&2OA&x;I3L!y`e!-5;A"""
    r""")fwzw(a4FjA#YKK43@WpkzcAkf98W%-}kSg&COrco-Ylwk_y|=R92?u0+xa%6W|cAr%g&v^*KV)(R!_%>XNwf%<j"""
    r"""x%0IR!>FFsu)<}Yd4HGPKV7amTA0j=m^(}8iNl(rkXyK}cCtL-g@duBqkf2aMXHWn`N+Tw7`RO3jSwN=i0C7GCaw"""
    r"""!08T;$}Z>luK6iP);T%756J8;taCZj=G>S4eXM(jLGFTn6;^1~-m&38aQVSIrEiFV#hD1ps*AH(U"""
)


def files() -> list[bytes]:
    """Return the two files."""
    both = zlib.decompress(base64.b85decode("".join(_FILES)))
    return [MAGIC + part for part in both.split(MAGIC)[1:]]


def stream() -> bytes:
    """Return the files as a server sends them, from the first one's beginning."""
    parts = []
    for number, content in enumerate(files(), start=2):
        name = f"binlog.{number:06}".encode()
        head = struct.pack("<IBIIIH", 0, 4, 1, 19 + 8 + len(name) + 4, 0, 0x20)
        rotate = head + struct.pack("<Q", 4) + name
        parts.append(packets(b"\0" + rotate + zlib.crc32(rotate).to_bytes(4, "little")))
        at = 4
        while at < len(content):
            (size,) = struct.unpack_from("<I", content, at + 9)
            event = bytearray(content[at : at + size])
            if event[4] == FORMAT_DESCRIPTION:
                event[17] &= 0xFE  # "in use", which the server takes away, and no checksum covers
            parts.append(packets(b"\0" + event))
            at += size
    return b"".join(parts)
