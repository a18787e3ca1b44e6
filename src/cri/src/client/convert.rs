//! Conversion between protobuf and our types.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use jiff::Timestamp;
use k8s_cri::v1;

use crate::{
    AuthConfig, Container, ContainerDetails, ContainerState, ContainerStatus, Environment, Image, PullRequest,
};

const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Bytes of a runtime's message that are kept: it is written to a status that every watcher receives.
const MAX_MESSAGE_BYTES: usize = 600;
/// Bytes of an operating system's or architecture's name; the longest of Go's has a dozen.
const MAX_PLATFORM_BYTES: usize = 64;

pub(super) fn image_spec(image: &str) -> v1::ImageSpec {
    v1::ImageSpec {
        image: image.to_owned(),
        user_specified_image: image.to_owned(),
        ..Default::default()
    }
}

pub(super) fn pull_request(request: &PullRequest) -> v1::PullImageRequest {
    v1::PullImageRequest {
        image: Some(image_spec(&request.image)),
        auth: request.auth.as_ref().map(auth),
        sandbox_config: Some(v1::PodSandboxConfig {
            labels: request.labels.clone().into_iter().collect(),
            annotations: request.annotations.clone().into_iter().collect(),
            ..Default::default()
        }),
    }
}

fn auth(auth: &AuthConfig) -> v1::AuthConfig {
    v1::AuthConfig {
        username: auth.username.clone(),
        password: auth.password.clone(),
        auth: auth.auth.clone(),
        server_address: auth.server_address.clone(),
        identity_token: auth.identity_token.clone(),
        registry_token: auth.registry_token.clone(),
    }
}

/// A runtime's message about a failed pull, without a repetition of the image's name, and truncated.
pub(super) fn clean_pull_message(message: &str) -> String {
    let mut message = message.strip_prefix("rpc error: ").unwrap_or(message);
    for start in [
        "failed to pull and unpack image \"",
        "failed to pull image \"",
        "failed to resolve reference \"",
    ] {
        let rest = message
            .strip_prefix(start)
            .and_then(|rest| rest.split_once("\": "));
        message = rest.map_or(message, |(_, rest)| rest);
    }
    truncate_message(message)
}

/// At most [`MAX_MESSAGE_BYTES`] of a message.
pub(super) fn truncate_message(message: &str) -> String {
    if message.len() <= MAX_MESSAGE_BYTES {
        return message.to_owned();
    }
    let end = message.floor_char_boundary(MAX_MESSAGE_BYTES);
    format!("{}…", message.get(..end).unwrap_or_default())
}

pub(super) fn image(image: v1::Image, info: &HashMap<String, String>) -> Image {
    Image {
        id: image.id,
        repo_tags: image.repo_tags,
        repo_digests: image.repo_digests,
        size: image.size,
        platform: info.get("info").and_then(|json| platform(json)),
        pinned: image.pinned,
    }
}

/// The platform from a verbose response, whose form CRI leaves to the runtime: containerd and CRI-O put the image's own
/// configuration into `imageSpec`. Its author may write anything there, and the platform gets into messages; what is not
/// a name is unknown.
fn platform(json: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Info {
        #[serde(rename = "imageSpec")]
        spec: Spec,
    }
    #[derive(serde::Deserialize)]
    struct Spec {
        architecture: String,
        os: String,
    }
    let Spec { architecture, os } = serde_json::from_str::<Info>(json).ok()?.spec;
    let is_name = |text: &str| {
        (1..=MAX_PLATFORM_BYTES).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
    };
    (is_name(&architecture) && is_name(&os)).then(|| format!("{os}/{architecture}"))
}

pub(super) fn container(c: v1::Container) -> Container {
    let metadata = c.metadata.unwrap_or_default();
    Container {
        id: c.id,
        name: metadata.name,
        state: state(c.state),
        created_at: timestamp(c.created_at),
        restart_count: restart_count(&c.annotations, metadata.attempt),
        labels: sorted(c.labels),
        annotations: sorted(c.annotations),
    }
}

pub(super) fn container_status(c: v1::ContainerStatus) -> ContainerStatus {
    let metadata = c.metadata.unwrap_or_default();
    ContainerStatus {
        id: c.id,
        name: metadata.name,
        state: state(c.state),
        created_at: timestamp(c.created_at),
        started_at: timestamp(c.started_at),
        finished_at: timestamp(c.finished_at),
        exit_code: c.exit_code,
        reason: c.reason,
        message: c.message,
        restart_count: restart_count(&c.annotations, metadata.attempt),
        image: c.image.unwrap_or_default().image,
        image_ref: c.image_ref,
        labels: sorted(c.labels),
        annotations: sorted(c.annotations),
    }
}

pub(super) fn container_details(c: v1::ContainerStatus, info: &HashMap<String, String>) -> ContainerDetails {
    ContainerDetails {
        status: container_status(c),
        environment: info.get("info").and_then(|json| environment(json)),
    }
}

/// The environment from a verbose response. containerd returns the request that created the container, whose list is
/// kubelet's; CRI-O returns the OCI specification, where the image's own environment comes first.
fn environment(json: &str) -> Option<Environment> {
    #[derive(serde::Deserialize)]
    struct Info {
        config: Option<Config>,
        #[serde(rename = "runtimeSpec")]
        spec: Option<Spec>,
    }
    #[derive(serde::Deserialize)]
    struct Config {
        #[serde(default)]
        envs: Vec<Pair>,
    }
    #[derive(serde::Deserialize)]
    struct Pair {
        key: String,
        #[serde(default)]
        value: String,
    }
    #[derive(serde::Deserialize)]
    struct Spec {
        process: Process,
    }
    #[derive(serde::Deserialize)]
    struct Process {
        #[serde(default)]
        env: Vec<String>,
    }
    let info: Info = serde_json::from_str(json).ok()?;
    if let Some(config) = info.config {
        return Some(config.envs.into_iter().map(|p| (p.key, p.value)).collect());
    }
    let lines = info.spec?.process.env;
    let pairs = lines.iter().filter_map(|line| line.split_once('='));
    Some(
        pairs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
    )
}

pub(super) fn pod_ips(network: v1::PodSandboxNetworkStatus) -> Vec<String> {
    std::iter::once(network.ip)
        .chain(network.additional_ips.into_iter().map(|ip| ip.ip))
        .filter(|ip| !ip.is_empty())
        .collect()
}

/// Whole seconds, rounded up.
pub(super) fn whole_seconds(d: Duration) -> i64 {
    let rounded_up = d.as_secs().saturating_add(u64::from(d.subsec_nanos() > 0));
    i64::try_from(rounded_up).unwrap_or(i64::MAX)
}

fn state(state: i32) -> ContainerState {
    match v1::ContainerState::try_from(state) {
        Ok(v1::ContainerState::ContainerCreated) => ContainerState::Created,
        Ok(v1::ContainerState::ContainerRunning) => ContainerState::Running,
        Ok(v1::ContainerState::ContainerExited) => ContainerState::Exited,
        Ok(v1::ContainerState::ContainerUnknown) | Err(_) => ContainerState::Unknown,
    }
}

/// CRI's times are nanoseconds since 1970; 0 means "not yet".
fn timestamp(nanos: i64) -> Option<Timestamp> {
    if nanos <= 0 {
        None
    } else {
        Timestamp::from_nanosecond(i128::from(nanos)).ok()
    }
}

fn restart_count(annotations: &HashMap<String, String>, attempt: u32) -> u32 {
    annotations
        .get(RESTART_COUNT)
        .and_then(|n| n.parse().ok())
        .unwrap_or(attempt)
}

fn sorted(map: HashMap<String, String>) -> BTreeMap<String, String> {
    map.into_iter().collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn pull_error_is_stripped_and_truncated() {
        let message = "failed to pull and unpack image \"r.test/a:1\": failed to resolve reference \"r.test/a:1\": dial: no";
        assert_eq!(clean_pull_message(message), "dial: no");
        assert_eq!(
            clean_pull_message("failed to resolve reference: no"),
            "failed to resolve reference: no"
        );
        let euros = format!("{}…", "€".repeat(MAX_MESSAGE_BYTES / 3));
        assert_eq!(clean_pull_message(&"€".repeat(10_000)), euros);
        assert_eq!(
            clean_pull_message(&format!("-{}", "€".repeat(10_000))).len(),
            MAX_MESSAGE_BYTES - 2 + 3
        );
    }

    #[test]
    fn platform_is_parsed_from_the_verbose_status() {
        let json = r#"{"chainID":"x","imageSpec":{"architecture":"arm64","os":"linux","config":{}}}"#;
        assert_eq!(platform(json).as_deref(), Some("linux/arm64"));
        assert_eq!(platform("{}"), None);
        assert_eq!(platform("not JSON"), None);
    }

    /// An image's author must not fill the status of every node with it.
    #[test]
    fn platform_that_is_no_name_is_unknown() {
        let parsed = |architecture: &str| {
            let info = serde_json::json!({ "imageSpec": { "architecture": architecture, "os": "linux" } });
            platform(&info.to_string())
        };
        let longest = "a".repeat(MAX_PLATFORM_BYTES);
        assert_eq!(parsed(&longest), Some(format!("linux/{longest}")));
        let too_long = "a".repeat(MAX_PLATFORM_BYTES + 1);
        for text in [too_long.as_str(), "", "amd64\nand more", "é"] {
            assert_eq!(parsed(text), None, "{text:?}");
        }
    }

    #[test]
    fn environment_is_parsed_and_debug_hides_values() {
        let request = r#"{"config":{"envs":[{"key":"A","value":"1"},{"key":"A","value":"two\nlines=2"},{"key":"E"}]},
            "runtimeSpec":{"process":{"env":["A=0"]}}}"#;
        let env = environment(request).unwrap();
        assert_eq!(
            (env.get("A"), env.get("E"), env.get("B")),
            (Some("two\nlines=2"), Some(""), None)
        );
        let spec = r#"{"pid":1,"runtimeSpec":{"process":{"env":["PATH=/bin","A=0","A=x=y"]}}}"#;
        let env = environment(spec).unwrap();
        assert_eq!(env.get("A"), Some("x=y"));
        assert_eq!(format!("{env:?}"), r#"{"A", "PATH"}"#);
        assert_eq!(environment("{}"), None);
        assert_eq!(environment("not JSON"), None);
    }

    #[test]
    fn seconds_are_rounded_up_and_zero_stays() {
        assert_eq!(whole_seconds(Duration::ZERO), 0);
        assert_eq!(whole_seconds(Duration::from_millis(1)), 1);
        assert_eq!(whole_seconds(Duration::MAX), i64::MAX);
    }

    #[test]
    fn zero_timestamps_are_none() {
        assert_eq!(timestamp(0), None);
        assert_eq!(timestamp(1_500_000_000).unwrap().as_millisecond(), 1500);
    }
}
