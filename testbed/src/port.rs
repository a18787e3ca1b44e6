//! Reserves ports for programs whose listen port is a setting.
//!
//! A free port may be taken before the program listens on it, or while the program restarts: by an outgoing
//! connection, to which the kernel gives any port of its ephemeral range, or by another test run. So reserved ports are
//! below that range, and a UDP socket with the same port number, which does not block TCP, reserves each one against
//! other runs until this process exits.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

/// Start of the ephemeral port range if the kernel does not report it.
const DEFAULT_EPHEMERAL_START: u16 = 32768;

/// Well-known servers such as kubelet use ports below this one.
const FIRST_PORT: u16 = 20000;

static RESERVED: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());

/// Returns a TCP port without a listener on any address, reserved until this process exits.
///
/// # Errors
/// All ports are taken.
pub fn reserve() -> Result<u16> {
    let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
    let range = reservable_range(std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok());
    let free = |port: u16| {
        let guard = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        // A listener on a single address also makes this fail.
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok()?;
        Some((port, guard))
    };
    let (port, guard) = range
        .clone()
        .find_map(free)
        .with_context(|| format!("every port of {range:?} is taken: see `ss -lntu`"))?;
    reserved.push(guard);
    Ok(port)
}

/// Ports outside the ephemeral range. `file` is the kernel's file with the range's first and last port.
fn reservable_range(file: Option<String>) -> Range<u16> {
    let first = file.and_then(|text| text.split_whitespace().next()?.parse().ok());
    // If the ephemeral range starts lower, too few ports are left.
    FIRST_PORT
        ..first
            .filter(|first| *first >= FIRST_PORT + 1000)
            .unwrap_or(DEFAULT_EPHEMERAL_START)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn reserved_ports_are_unique_and_can_be_rebound() {
        let ports = [(); 20].map(|()| reserve().unwrap());
        for (index, port) in ports.iter().enumerate() {
            assert!(!ports[..index].contains(port), "{ports:?}");
            for _ in 0..2 {
                TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).unwrap();
            }
        }
    }

    #[test]
    fn reserve_skips_a_port_with_a_listener() {
        let port = reserve().unwrap();
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        RESERVED
            .lock()
            .unwrap()
            .retain(|socket| socket.local_addr().unwrap().port() != port);
        assert!([(); 5].map(|()| reserve().unwrap()).iter().all(|p| *p != port));
    }

    #[test]
    fn reservable_range_excludes_ephemeral_ports() {
        assert_eq!(reservable_range(Some("32768\t60999\n".into())), 20000..32768);
        assert_eq!(reservable_range(Some("25000 30000".into())), 20000..25000);
        for input in [None, Some("1024 65535".into()), Some(String::new())] {
            assert_eq!(reservable_range(input), 20000..DEFAULT_EPHEMERAL_START);
        }
    }
}
