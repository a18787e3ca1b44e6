//! Whether one of our programs is ready, and its other HTTP responses.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Response of `/readyz`; empty if nothing responds.
pub fn readyz(address: &str) -> String {
    http_get(address, "/readyz")
}

/// Response at this path, with the headers.
pub fn http_get(address: &str, path: &str) -> String {
    let mut response = String::new();
    if let Ok(mut stream) = TcpStream::connect(address) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let sent = stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .and_then(|()| stream.write_all(request.as_bytes()));
        if sent.is_ok() {
            // If the connection breaks, the response is incomplete.
            let _ = stream.read_to_string(&mut response);
        }
    }
    response
}

/// Whether `/readyz` reports ready.
pub fn is_ready(address: &str) -> bool {
    readyz(address).starts_with("HTTP/1.1 200")
}
