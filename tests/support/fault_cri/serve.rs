//! A minimal gRPC server: one connection, its calls, their faults.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_cri::v1;
use prost::Message;
use serde_json::json;
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Code, Status};

use super::{FakeContainer, Fault, State};

type SharedState = Arc<Mutex<State>>;
type CallResult = Result<Vec<u8>, Status>;

pub(super) async fn connection(stream: UnixStream, shared: SharedState, end: CancellationToken) {
    let ended = end.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let (shared, end) = (Arc::clone(&shared), end.clone());
        async move { Ok::<_, Infallible>(call(request, shared, end).await) }
    });
    let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    tokio::select! {
        _ = http.serve_connection(TokioIo::new(stream), service) => (),
        () = ended.cancelled() => (),
    }
}

async fn call(
    request: Request<Incoming>,
    shared: SharedState,
    connection_end: CancellationToken,
) -> Response<Body> {
    let method = request
        .uri()
        .path()
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .to_owned();
    let fault = {
        let mut state = shared.lock().unwrap();
        *state.calls.entry(method.clone()).or_default() += 1;
        let (current, peak) = state.in_flight.entry(method.clone()).or_default();
        *current += 1;
        *peak = (*peak).max(*current);
        state.changed.notify_waiters();
        state.faults.get(&method).cloned()
    };
    let _in_flight = InFlightGuard(Arc::clone(&shared), method.clone());
    let message = read_message(request).await;
    let result = match fault {
        Some(Fault::Hang) => pending().await,
        Some(Fault::Blocked) => {
            let still_blocked = |state: &State| matches!(state.faults.get(&method), Some(Fault::Blocked));
            super::wait_until(&shared, |state| !still_blocked(state)).await;
            handle(&method, &message, &shared).await
        }
        Some(Fault::Disconnect) => {
            connection_end.cancel();
            pending().await
        }
        Some(Fault::Slow(time)) => {
            tokio::time::sleep(time).await;
            handle(&method, &message, &shared).await
        }
        Some(Fault::Oversize(bytes)) => handle(&method, &message, &shared)
            .await
            .map(|m| append_padding(m, bytes)),
        Some(Fault::Unimplemented) => Err(Status::unimplemented(format!("unknown method {method}"))),
        Some(Fault::Garbage) => Ok(vec![0xff; 64]),
        Some(Fault::Status(code, message)) => Err(Status::new(code, message)),
        None => handle(&method, &message, &shared).await,
    };
    shared.lock().unwrap().changed.notify_waiters();
    respond(result)
}

/// A call until it ends, or is cancelled.
struct InFlightGuard(SharedState, String);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut state = self.0.lock().unwrap();
        if let Some((now, _)) = state.in_flight.get_mut(&self.1) {
            *now -= 1;
        }
    }
}

/// The one message of a unary request.
async fn read_message(request: Request<Incoming>) -> Vec<u8> {
    use http_body_util::BodyExt;
    let bytes = request
        .into_body()
        .collect()
        .await
        .map(|b| b.to_bytes())
        .unwrap_or_default();
    bytes.get(5..).unwrap_or_default().to_vec()
}

/// A field that no message has and readers must skip: only its length matters.
fn append_padding(mut message: Vec<u8>, bytes: usize) -> Vec<u8> {
    prost::encoding::encode_key(2047, prost::encoding::WireType::LengthDelimited, &mut message);
    prost::encoding::encode_varint(bytes as u64, &mut message);
    message.resize(message.len() + bytes, b'x');
    message
}

fn respond(result: CallResult) -> Response<Body> {
    match result {
        Ok(message) => {
            let mut frame = vec![0];
            frame.extend((message.len() as u32).to_be_bytes());
            frame.extend(message);
            let trailers = http::HeaderMap::from_iter([(
                http::HeaderName::from_static("grpc-status"),
                http::HeaderValue::from_static("0"),
            )]);
            let frames = [
                Ok::<_, Infallible>(hyper::body::Frame::data(hyper::body::Bytes::from(frame))),
                Ok(hyper::body::Frame::trailers(trailers)),
            ];
            let body = Body::new(http_body_util::StreamBody::new(futures::stream::iter(frames)));
            let mut response = Response::new(body);
            let grpc = http::HeaderValue::from_static("application/grpc");
            response.headers_mut().insert(http::header::CONTENT_TYPE, grpc);
            response
        }
        Err(status) => status.into_http(),
    }
}

fn decode<T: Message + Default>(message: &[u8]) -> Result<T, Status> {
    T::decode(message).map_err(|e| Status::invalid_argument(e.to_string()))
}

/// Executes the method, as far as it is implemented.
async fn handle(method: &str, message: &[u8], shared: &SharedState) -> CallResult {
    if method == "PullImage" {
        return pull_image(decode(message)?, shared).await;
    }
    let mut state = shared.lock().unwrap();
    Ok(match method {
        "Version" => v1::VersionResponse {
            version: "0.1.0".into(),
            runtime_name: state.runtime_name.clone(),
            runtime_version: "1.0.0-fault".into(),
            runtime_api_version: "v1".into(),
        }
        .encode_to_vec(),
        "ImageFsInfo" => v1::ImageFsInfoResponse::default().encode_to_vec(),
        "ImageStatus" => {
            let name = decode::<v1::ImageStatusRequest>(message)?
                .image
                .unwrap_or_default()
                .image;
            v1::ImageStatusResponse {
                image: state.images.get(&name).cloned(),
                ..Default::default()
            }
            .encode_to_vec()
        }
        "ListContainers" => list_containers(&state, &decode(message)?).encode_to_vec(),
        "ContainerStatus" => container_status(&state, &decode(message)?)?.encode_to_vec(),
        "StopContainer" => stop_container(&mut state, &decode(message)?)?.encode_to_vec(),
        "ListPodSandbox" => {
            let items = state.pod_ip.iter().map(|_| v1::PodSandbox::default());
            let items = items.collect();
            v1::ListPodSandboxResponse { items }.encode_to_vec()
        }
        "PodSandboxStatus" => pod_sandbox_status(&state).encode_to_vec(),
        "ExecSync" => exec_sync(&mut state, &decode(message)?).encode_to_vec(),
        other => {
            return Err(Status::new(
                Code::Unimplemented,
                format!("unknown method {other}"),
            ));
        }
    })
}

fn pod_sandbox_status(state: &State) -> v1::PodSandboxStatusResponse {
    let network = v1::PodSandboxNetworkStatus {
        ip: state.pod_ip.clone().unwrap_or_default(),
        additional_ips: Vec::new(),
    };
    let status = v1::PodSandboxStatus {
        network: Some(network),
        ..Default::default()
    };
    v1::PodSandboxStatusResponse {
        status: Some(status),
        ..Default::default()
    }
}

fn exec_sync(state: &mut State, request: &v1::ExecSyncRequest) -> v1::ExecSyncResponse {
    let container = state.containers.get_mut(&request.container_id);
    let printed = container.and_then(|c| c.exec_outputs.pop_front());
    let (exit_code, text) = printed.unwrap_or_else(|| (0, request.cmd.join(" ")));
    v1::ExecSyncResponse {
        stdout: text.into_bytes(),
        stderr: Vec::new(),
        exit_code,
    }
}

fn stop_container(
    state: &mut State,
    request: &v1::StopContainerRequest,
) -> Result<v1::StopContainerResponse, Status> {
    let found = state.containers.get_mut(&request.container_id);
    let container = found.ok_or_else(|| Status::not_found("no such container"))?;
    container.running = false;
    container.stop_grace_seconds = Some(request.timeout);
    Ok(v1::StopContainerResponse {})
}

/// Counts a pull while it runs, and detects when the client cancels it.
struct PullGuard<'a>(&'a SharedState, bool);

impl Drop for PullGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock().unwrap();
        state.active_pulls -= 1;
        state.cancelled_pulls += usize::from(!self.1);
        state.changed.notify_waiters();
    }
}

async fn pull_image(request: v1::PullImageRequest, shared: &SharedState) -> CallResult {
    let delay = {
        let mut state = shared.lock().unwrap();
        state.pulls.push(request.clone());
        state.active_pulls += 1;
        state.max_active_pulls = state.max_active_pulls.max(state.active_pulls);
        state.changed.notify_waiters();
        state.pull_delay
    };
    let mut pulling = PullGuard(shared, false);
    tokio::time::sleep(delay).await;
    pulling.1 = true;
    let result = shared.lock().unwrap().pull_result(&request);
    result.map(|a| a.encode_to_vec())
}

fn list_containers(state: &State, request: &v1::ListContainersRequest) -> v1::ListContainersResponse {
    let filter = request.filter.clone().unwrap_or_default();
    let uid = filter.label_selector.get("io.kubernetes.pod.uid").cloned();
    let pod_containers = state
        .containers
        .iter()
        .filter(|(_, c)| uid.as_ref().is_none_or(|uid| *uid == c.pod_uid));
    let containers = pod_containers
        .map(|(id, c)| v1::Container {
            id: id.clone(),
            metadata: Some(metadata(c)),
            state: if c.running { 1 } else { 2 },
            created_at: c.created_at,
            labels: labels(c),
            ..Default::default()
        })
        .collect();
    v1::ListContainersResponse { containers }
}

fn metadata(c: &FakeContainer) -> v1::ContainerMetadata {
    v1::ContainerMetadata {
        name: c.name.clone(),
        attempt: c.restart_count,
    }
}

fn labels(c: &FakeContainer) -> HashMap<String, String> {
    HashMap::from([("io.kubernetes.pod.uid".to_owned(), c.pod_uid.clone())])
}

fn container_status(
    state: &State,
    request: &v1::ContainerStatusRequest,
) -> Result<v1::ContainerStatusResponse, Status> {
    let id = &request.container_id;
    let c = state
        .containers
        .get(id)
        .ok_or_else(|| Status::not_found("no such container"))?;
    let status = v1::ContainerStatus {
        id: id.clone(),
        metadata: Some(metadata(c)),
        state: if c.running { 1 } else { 2 },
        created_at: c.created_at,
        started_at: c.created_at,
        labels: labels(c),
        annotations: HashMap::from([("io.kubernetes.container.hash".to_owned(), format!("{:x}", c.hash))]),
        ..Default::default()
    };
    let verbose_info = c.env.as_ref().filter(|_| request.verbose).map(|env| {
        let envs: Vec<_> = env
            .iter()
            .map(|(key, value)| json!({ "key": key, "value": value }))
            .collect();
        (
            "info".to_owned(),
            json!({ "config": { "envs": envs } }).to_string(),
        )
    });
    Ok(v1::ContainerStatusResponse {
        status: Some(status),
        info: verbose_info.into_iter().collect(),
    })
}
