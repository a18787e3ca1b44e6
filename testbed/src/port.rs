//! Ports for programs that are told where to listen.
//!
//! A port that was free a moment ago may be taken when the program comes to it, or while it is restarted: by an
//! outgoing connection, to which the kernel gives any port of its range, or by another run of tests. So these lie
//! below that range, and a UDP socket of the same number, which hinders no TCP, holds them against other runs for as
//! long as this process lives.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

/// The kernel's first port for outgoing connections, where it does not tell.
const OUTGOING: u16 = 32768;

/// Below are servers that everybody knows, kubelet and its like among them.
const FIRST: u16 = 20000;

static HELD: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());

/// A TCP port that nobody listens on, on any address, and that is this process's until it ends.
///
/// # Errors
/// All ports are taken.
pub fn reserve() -> Result<u16> {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    let range = range(std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok());
    let free = |port: u16| {
        let hold = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        // Who listens on one address is in the way of this, too.
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok()?;
        Some((port, hold))
    };
    let (port, hold) = range
        .clone()
        .find_map(free)
        .with_context(|| format!("every port of {range:?} is taken: see `ss -lntu`"))?;
    held.push(hold);
    Ok(port)
}

/// Where no outgoing connection gets its port, by the kernel's file (first and last one).
fn range(file: Option<String>) -> Range<u16> {
    let first = file.and_then(|text| text.split_whitespace().next()?.parse().ok());
    // A range that begins lower leaves too few.
    FIRST..first.filter(|first| *first >= FIRST + 1000).unwrap_or(OUTGOING)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_reserved_port_can_be_listened_on_again_and_again_and_is_given_once() {
        let ports = [(); 20].map(|()| reserve().unwrap());
        for (at, port) in ports.iter().enumerate() {
            assert!(!ports[..at].contains(port), "{ports:?}");
            for _ in 0..2 {
                TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).unwrap();
            }
        }
    }

    #[test]
    fn a_port_that_somebody_listens_on_is_passed_over() {
        let port = reserve().unwrap();
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        HELD.lock()
            .unwrap()
            .retain(|held| held.local_addr().unwrap().port() != port);
        assert!([(); 5].map(|()| reserve().unwrap()).iter().all(|p| *p != port));
    }

    #[test]
    fn outgoing_connections_get_no_port_of_the_range() {
        assert_eq!(range(Some("32768\t60999\n".into())), 20000..32768);
        assert_eq!(range(Some("25000 30000".into())), 20000..25000);
        for odd in [None, Some("1024 65535".into()), Some(String::new())] {
            assert_eq!(range(odd), 20000..OUTGOING);
        }
    }
}
