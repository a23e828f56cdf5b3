//! With other people's MASQUE at the other end. `docs/protocol.md` lists the versions, `tests/interop` has the programs.

mod aioquic;
mod connect_ip_go;
mod http2;
mod masque_go;
