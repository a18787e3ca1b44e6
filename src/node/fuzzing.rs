//! What the daemon reads, for `crate::fuzzing`.

use super::hook::http;
use super::image_pull;

/// Where the server of a preStop hook redirects to: never away from it.
pub fn hook_answer(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (host, location) = text.split_once('\n').unwrap_or((&text, ""));
    for tls in [false, true] {
        let request = http::Get {
            tls,
            host: host.to_owned(),
            port: 80,
            path: "/".to_owned(),
            headers: Vec::new(),
        };
        if let Some(path) = http::redirect(&request, location) {
            assert!(path.starts_with('/'), "{path:?}");
        }
    }
}

/// A NodeImage.
pub fn node_image(data: &[u8]) {
    image_pull::read(data);
}
