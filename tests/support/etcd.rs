//! What a bed's etcd holds, past the API server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// How long etcd may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks etcd's gateway at `store`.
pub fn etcd(store: &str, path: &str, body: &Value) -> Value {
    let mut stream = TcpStream::connect(store).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = body.to_string();
    // In HTTP/1.0 the answer is not cut into chunks.
    let head = format!(
        "POST /v3/kv/{path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (_, json) = answer
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("{answer}"));
    serde_json::from_str(json).unwrap_or_else(|_| panic!("{answer}"))
}
