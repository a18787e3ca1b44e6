//! Direct access to a bed's etcd, without the API server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// Timeout of a request to etcd.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Sends a request to etcd's gateway at `endpoint`.
pub fn etcd_request(endpoint: &str, path: &str, body: &Value) -> Value {
    let mut stream = TcpStream::connect(endpoint).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let body = body.to_string();
    // In HTTP/1.0 the response is not chunked.
    let head = format!(
        "POST /v3/kv/{path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (_, json) = response
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("{response}"));
    serde_json::from_str(json).unwrap_or_else(|_| panic!("{response}"))
}
