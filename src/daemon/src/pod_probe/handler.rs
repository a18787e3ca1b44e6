//! Runs one probe as kubelet does.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::net::TcpStream;
use tonic::Code;
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use super::plan::{Handler, Outcome};
use crate::hook::http::{self as http_client, HookRequest, host_and_port};
use crate::pods::NodePod;
use kruise_api::node_pod_probe::MAX_MESSAGE_CHARS;
use kruise_cri::{self as cri, ExecOutput, Runtime};

/// Maximum bytes that a command may print; kubelet's runtimes return up to 16 MiB, which of all probes at a time would
/// be a gigabyte. Of a longer response nothing is read, not even the exit code.
const MAX_EXEC_OUTPUT: usize = 256 << 10;
/// Maximum bytes of an HTTP body that are read, as in kubelet.
const MAX_BODY: usize = 10 << 10;
/// Maximum bytes of an answer of a health service.
const MAX_GRPC_ANSWER: usize = 4 << 10;
const NO_RUNTIME: &str = "the container runtime does not answer";
/// Servers recognize kubelet's probes by this.
const USER_AGENT: &str = concat!("kube-probe/1 kruise-daemon/", env!("CARGO_PKG_VERSION"));

/// What a probe is for.
pub struct ProbeTarget {
    /// The runtime of the container, if it answers.
    pub runtime: Option<Arc<dyn Runtime>>,
    /// ID of the container, without scheme.
    pub container_id: String,
    /// The Pod's address, if it has one.
    pub host: Option<String>,
}

/// Checks that the probe would reach its Pod and nothing else: the container's ID and the address are from the Pod's
/// status, which other clients than kubelet may be allowed to write.
///
/// # Errors
/// Why it is not run.
pub async fn verify(handler: &Handler, target: &ProbeTarget, pod: &NodePod) -> Result<(), String> {
    let runtime = target.runtime.as_deref().ok_or(NO_RUNTIME)?;
    let unreadable = |error: cri::Error| {
        format!(
            "the container runtime does not show the Pod ({})",
            error.category()
        )
    };
    match handler {
        Handler::Invalid(_) => Ok(()),
        Handler::Exec { .. } => {
            let status = runtime
                .container_status(&target.container_id)
                .await
                .map_err(unreadable)?;
            match status.filter(|status| pod.owns_container(&status.labels)) {
                Some(_) => Ok(()),
                None => Err("the container in the Pod's status is not one of the Pod".to_owned()),
            }
        }
        Handler::Http { .. } | Handler::Tcp { .. } | Handler::Grpc { .. } => {
            let Some(host) = &target.host else { return Ok(()) };
            let ips = runtime.pod_ips(&pod.runtime_uid).await.map_err(unreadable)?;
            is_pod_address(host, &ips, pod.host_network)
                .then_some(())
                .ok_or_else(|| format!("the address in the Pod's status, {host}, is not the Pod's"))
        }
    }
}

/// Whether an address in a Pod's status is the Pod's: the runtime knows those of its own network. A Pod without a sandbox
/// has none yet.
fn is_pod_address(host: &str, ips: &[String], host_network: bool) -> bool {
    ips.iter().any(|ip| ip == host) || host_network && ips.is_empty() && is_node_address(host)
}

/// Whether an address may be that of a node: no loopback or link-local one, where services for the node itself listen.
fn is_node_address(host: &str) -> bool {
    match host.parse() {
        Ok(IpAddr::V4(ip)) => {
            !(ip.is_loopback()
                || ip.is_link_local()
                || ip.is_unspecified()
                || ip.is_multicast()
                || ip.is_broadcast())
        }
        Ok(IpAddr::V6(ip)) => {
            !(ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified() || ip.is_multicast())
                && ip.to_ipv4_mapped().is_none()
        }
        Err(_) => false,
    }
}

/// Runs a probe to its end, for at most `timeout`. Dropping the future cancels it; a command that it has started in the
/// container continues to run.
pub async fn run(handler: &Handler, target: &ProbeTarget, timeout: Duration) -> Outcome {
    match handler {
        Handler::Exec { command } => return exec(command, target, timeout).await,
        Handler::Invalid(why) => return Outcome::Error(why.clone()),
        Handler::Http { .. } | Handler::Tcp { .. } | Handler::Grpc { .. } => {}
    }
    let Some(host) = &target.host else {
        return Outcome::Error("the Pod has no address".to_owned());
    };
    let probe = async {
        match handler {
            Handler::Http {
                tls,
                port,
                path,
                headers,
            } => {
                let request = HookRequest {
                    tls: *tls,
                    host: host.clone(),
                    port: *port,
                    path: path.clone(),
                    headers: with_user_agent(headers),
                };
                // Most probes are commands: they do not carry the memory of these.
                Box::pin(http_get(&request)).await
            }
            Handler::Tcp { port } => match TcpStream::connect((host.as_str(), *port)).await {
                Ok(_) => Outcome::Success(String::new()),
                Err(error) => Outcome::Failure(format!("dial tcp {}: {error}", host_and_port(host, *port))),
            },
            Handler::Grpc { port, service } => {
                Box::pin(grpc_health(&host_and_port(host, *port), service)).await
            }
            Handler::Exec { .. } | Handler::Invalid(_) => {
                Outcome::Error("this probe is not sent to an address".to_owned())
            }
        }
    };
    let timed_out = || Outcome::Failure(format!("timed out after {}s", timeout.as_secs()));
    tokio::time::timeout(timeout, probe)
        .await
        .unwrap_or_else(|_| timed_out())
}

async fn exec(command: &[String], target: &ProbeTarget, timeout: Duration) -> Outcome {
    let Some(runtime) = &target.runtime else {
        return Outcome::Error(NO_RUNTIME.to_owned());
    };
    let ended = runtime
        .exec_sync(&target.container_id, command, timeout, MAX_EXEC_OUTPUT)
        .await;
    if let Err(error) = &ended {
        tracing::debug!(container = target.container_id, ?command, %error, "command of a probe has no exit code");
    }
    // The command hangs, or the runtime does, which says nothing about the container.
    if matches!(ended, Err(cri::Error::Timeout { .. })) && runtime.version().await.is_err() {
        return Outcome::Error(NO_RUNTIME.to_owned());
    }
    exec_outcome(ended, timeout)
}

fn exec_outcome(ended: Result<Option<ExecOutput>, cri::Error>, timeout: Duration) -> Outcome {
    // A character has at most four bytes.
    let text = |output: &[u8]| {
        let used = output.get(..4 * MAX_MESSAGE_CHARS).unwrap_or(output);
        String::from_utf8_lossy(used).into_owned()
    };
    match ended {
        Ok(Some(output)) if output.exit_code == 0 => Outcome::Success(text(&output.stdout)),
        Ok(Some(output)) => Outcome::Failure(text(&output.stderr)),
        Ok(None) => Outcome::Unknown(format!(
            "the command printed more than {} KiB, so its exit code is not known: redirect its output to /dev/null",
            MAX_EXEC_OUTPUT >> 10
        )),
        Err(cri::Error::Timeout { .. }) => {
            Outcome::Failure(format!("command timed out after {}s", timeout.as_secs()))
        }
        Err(error) => Outcome::Error(format!(
            "the container runtime could not run the command ({})",
            error.category()
        )),
    }
}

/// The headers, with kubelet's user agent if they have none.
fn with_user_agent(headers: &[(String, String)]) -> Vec<(String, String)> {
    let mut headers = headers.to_vec();
    if !headers
        .iter()
        .any(|(name, _)| name.eq_ignore_ascii_case("user-agent"))
    {
        headers.push(("User-Agent".to_owned(), USER_AGENT.to_owned()));
    }
    headers
}

async fn http_get(request: &HookRequest) -> Outcome {
    match http_client::get_response(request, MAX_BODY).await {
        Ok(Some(response)) => {
            let body = String::from_utf8_lossy(&response.body);
            match response.status.as_u16() {
                200..=299 => Outcome::Success(body.into_owned()),
                300..=399 => Outcome::Success(format!("Probe terminated redirects, Response body: {body}")),
                code => Outcome::Failure(format!("HTTP probe failed with statuscode: {code}")),
            }
        }
        Ok(None) => Outcome::Failure("the head of the response is too long".to_owned()),
        Err(error @ http_client::Error::Invalid(_)) => Outcome::Error(error.to_string()),
        Err(error) => Outcome::Failure(error.to_string()),
    }
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The method of gRPC's health protocol.
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// Names of `HealthCheckResponse.ServingStatus`.
const SERVING_STATUS: [&str; 4] = ["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"];

async fn grpc_health(address: &str, service: &str) -> Outcome {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).and_then(|e| e.user_agent(USER_AGENT));
    let endpoint = match endpoint {
        Ok(endpoint) => endpoint,
        Err(error) => return Outcome::Error(format!("grpc: {address}: {error}")),
    };
    let channel = match endpoint.connect().await {
        Ok(channel) => channel,
        Err(error) => {
            let why = std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
            return Outcome::Failure(format!("failed to connect service {address:?}: {why}"));
        }
    };
    let mut client = Grpc::new(channel).max_decoding_message_size(MAX_GRPC_ANSWER);
    if let Err(error) = client.ready().await {
        return Outcome::Failure(format!("failed to connect service {address:?}: {error}"));
    }
    let request = tonic::Request::new(HealthCheckRequest {
        service: service.to_owned(),
    });
    let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    match client
        .unary(request, PathAndQuery::from_static(HEALTH_CHECK), codec)
        .await
    {
        Ok(answer) => {
            let status = usize::try_from(answer.get_ref().status).ok();
            match status.and_then(|status| SERVING_STATUS.get(status)) {
                Some(&"SERVING") => Outcome::Success("service healthy".to_owned()),
                other => {
                    let status = other.copied().unwrap_or("UNKNOWN");
                    Outcome::Failure(format!("service unhealthy (responded with {status:?})"))
                }
            }
        }
        Err(status) if status.code() == Code::Unimplemented => Outcome::Failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Err(status) => Outcome::Failure(format!(
            "error: health rpc probe failed: {} ({:?})",
            status.message(),
            status.code()
        )),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn target() -> ProbeTarget {
        ProbeTarget {
            runtime: None,
            container_id: "c".to_owned(),
            host: Some("127.0.0.1".to_owned()),
        }
    }

    async fn closed_port() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().port()
    }

    async fn run_on(handler: Handler) -> Outcome {
        run(&handler, &target(), Duration::from_secs(30)).await
    }

    #[tokio::test]
    async fn http_probe_result_is_that_of_the_status_code() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let mut agents = Vec::new();
            for head in ["200 OK", "404 N", "307 T\r\nlocation: http://10.0.0.1/"] {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).await.unwrap();
                agents.push(String::from_utf8_lossy(&request[..length]).into_owned());
                let answer = format!("HTTP/1.1 {head}\r\ncontent-length: 2\r\n\r\nhi");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            agents
        });
        let get = || Handler::Http {
            tls: false,
            port,
            path: "/".to_owned(),
            headers: Vec::new(),
        };
        assert_eq!(run_on(get()).await, Outcome::Success("hi".to_owned()));
        let failed = "HTTP probe failed with statuscode: 404".to_owned();
        assert_eq!(run_on(get()).await, Outcome::Failure(failed));
        let redirected = "Probe terminated redirects, Response body: hi".to_owned();
        assert_eq!(run_on(get()).await, Outcome::Success(redirected));
        assert!(
            server.await.unwrap()[0]
                .to_lowercase()
                .contains("user-agent: kube-probe/1 ")
        );
    }

    #[tokio::test]
    async fn port_that_nothing_listens_on_fails_and_is_named() {
        let port = closed_port().await;
        let handlers = [
            Handler::Tcp { port },
            Handler::Http {
                tls: false,
                port,
                path: String::new(),
                headers: Vec::new(),
            },
            Handler::Grpc {
                port,
                service: String::new(),
            },
        ];
        for handler in handlers {
            let outcome = run_on(handler).await;
            let named =
                matches!(&outcome, Outcome::Failure(why) if why.contains(&format!("127.0.0.1:{port}")));
            assert!(named, "{outcome:?}");
        }
    }

    /// A health service that answers with this status for service `known`, and is unimplemented under another path.
    #[derive(Clone)]
    struct Health(i32);

    impl tonic::server::NamedService for Health {
        const NAME: &'static str = "grpc.health.v1.Health";
    }

    impl tonic::server::UnaryService<HealthCheckRequest> for Health {
        type Response = HealthCheckResponse;
        type Future = std::future::Ready<Result<tonic::Response<HealthCheckResponse>, tonic::Status>>;

        fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
            let agent = request.metadata().get("user-agent").unwrap().to_str().unwrap();
            assert!(agent.starts_with("kube-probe/1 "), "{agent}");
            std::future::ready(match request.get_ref().service.as_str() {
                "known" => Ok(tonic::Response::new(HealthCheckResponse { status: self.0 })),
                _ => Err(tonic::Status::not_found("unknown service")),
            })
        }
    }

    impl tower::Service<http::Request<tonic::body::Body>> for Health {
        type Response = http::Response<tonic::body::Body>;
        type Error = std::convert::Infallible;
        type Future = futures::future::BoxFuture<'static, Result<Self::Response, Self::Error>>;

        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
            std::task::Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
            let (service, codec) = (
                self.clone(),
                ProstCodec::<HealthCheckResponse, HealthCheckRequest>::default(),
            );
            Box::pin(async move { Ok(tonic::server::Grpc::new(codec).unary(service, request).await) })
        }
    }

    #[tokio::test]
    async fn grpc_probe_result_is_that_of_the_health_service() {
        for (status, expected) in [
            (1, Outcome::Success("service healthy".to_owned())),
            (
                2,
                Outcome::Failure("service unhealthy (responded with \"NOT_SERVING\")".to_owned()),
            ),
            (
                77,
                Outcome::Failure("service unhealthy (responded with \"UNKNOWN\")".to_owned()),
            ),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
            let server = tonic::transport::Server::builder().add_service(Health(status));
            let server = tokio::spawn(server.serve_with_incoming(incoming));
            let grpc = |service: &str| Handler::Grpc {
                port,
                service: service.to_owned(),
            };
            assert_eq!(run_on(grpc("known")).await, expected);
            let unknown = "error: health rpc probe failed: unknown service (NotFound)".to_owned();
            assert_eq!(run_on(grpc("other")).await, Outcome::Failure(unknown));
            server.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn server_that_never_answers_fails_after_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let handler = Handler::Http {
            tls: false,
            port,
            path: String::new(),
            headers: Vec::new(),
        };
        let outcome = run(&handler, &target(), Duration::from_secs(2)).await;
        assert_eq!(outcome, Outcome::Failure("timed out after 2s".to_owned()));
    }

    #[test]
    fn command_that_prints_too_much_has_an_unknown_result_with_advice() {
        let outcome = exec_outcome(Ok(None), Duration::from_secs(1));
        let advises = matches!(
            &outcome,
            Outcome::Unknown(why) if why.contains("256 KiB") && why.ends_with("redirect its output to /dev/null")
        );
        assert!(advises, "{outcome:?}");
    }

    #[test]
    fn output_of_a_command_is_kept_as_far_as_a_message_has_room() {
        for (printed, exit_code) in [("a", 0), ("é", 0), ("🦀", 1)] {
            let output = printed.repeat(MAX_EXEC_OUTPUT / 4).into_bytes();
            let ended = ExecOutput {
                stdout: output.clone(),
                stderr: output,
                exit_code,
            };
            let outcome = exec_outcome(Ok(Some(ended)), Duration::from_secs(1));
            let (Outcome::Success(text) | Outcome::Failure(text)) = outcome else {
                unreachable!()
            };
            assert!(text.starts_with(&printed.repeat(MAX_MESSAGE_CHARS)), "{printed}");
            assert!(text.len() <= 4 * MAX_MESSAGE_CHARS, "{printed}: {}", text.len());
        }
    }

    #[test]
    fn only_pods_of_the_host_network_have_its_address() {
        let own = ["10.0.0.1".to_owned()];
        for host_network in [true, false] {
            assert!(is_pod_address("10.0.0.1", &own, host_network));
            assert!(!is_pod_address("10.96.0.1", &own, host_network));
            assert_eq!(is_pod_address("10.96.0.1", &[], host_network), host_network);
            assert!(!is_pod_address("127.0.0.1", &[], host_network));
        }
    }

    #[test]
    fn addresses_of_the_node_itself_are_no_addresses_of_pods() {
        for host in [
            "127.0.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "::1",
            "::ffff:127.0.0.1",
            "fe80::1",
            "::",
            "node",
            "",
        ] {
            assert!(!is_node_address(host), "{host}");
        }
        for host in ["10.0.0.1", "192.168.1.1", "fd00::1"] {
            assert!(is_node_address(host), "{host}");
        }
    }

    #[tokio::test]
    async fn pod_without_an_address_is_not_probed() {
        let target = ProbeTarget {
            host: None,
            ..target()
        };
        let outcome = run(
            &Handler::Tcp {
                port: closed_port().await,
            },
            &target,
            Duration::from_secs(1),
        )
        .await;
        assert_eq!(outcome, Outcome::Error("the Pod has no address".to_owned()));
    }
}
