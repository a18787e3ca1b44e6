//! CRI v1 over a unix socket.
//!
//! In:  the socket's path, the duties' calls.
//! Out: the runtime's responses as plain types, or a typed error within each call's deadline.
//!
//! The connection is opened at the first call and again after the runtime has restarted; the socket's path is opened
//! again each time, so a replaced socket is found.

mod call;
mod containerd;
mod convert;
mod pins;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use k8s_cri::v1;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use self::call::{CALL_TIMEOUT, Call, MAX_RESPONSE_BYTES};
use self::containerd::ContentStore;
use self::pins::ImageRecords;
use super::{
    Container, ContainerDetails, ContainerStatus, DownloadProgress, Error, ExecOutput, Image, ImagePins,
    PullCause, PullRequest, Runtime, Version,
};

/// Timeout of each of the two calls that check a socket which was just found.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest verbose response that is read: it contains text of a Pod's or an image's author, several run
/// concurrently, and the whole process fits into 64 MiB.
const MAX_VERBOSE_BYTES: usize = 2 << 20;
/// Bytes of an ExecSync response apart from the output.
const EXEC_FIELDS: usize = 64;
/// The label with the Pod's UID on every container and sandbox that kubelet creates.
const POD_UID_LABEL: &str = "io.kubernetes.pod.uid";

/// A runtime that has answered at its socket.
pub struct CriClient {
    name: String,
    socket: PathBuf,
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    content: Option<ContentStore>,
    records: Option<Arc<ImageRecords>>,
}

impl CriClient {
    /// Requests the version of the runtime at `socket`, and checks that both CRI services are there.
    pub async fn connect(socket: &Path) -> Result<(Self, Version), Error> {
        let channel = channel(socket);
        let mut client = Self {
            name: String::new(),
            socket: socket.to_owned(),
            runtime: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES),
            images: ImageServiceClient::new(channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES),
            content: None,
            records: None,
        };
        let version = client.fetch_version(PROBE_TIMEOUT).await?;
        client.fetch_image_fs_info(PROBE_TIMEOUT).await?;
        client.name.clone_from(&version.runtime_name);
        if client.name == "containerd" {
            client.content = Some(ContentStore::new(channel.clone(), socket.to_owned()));
            client.records = Some(Arc::new(ImageRecords::new(channel, socket.to_owned())));
        }
        Ok((client, version))
    }

    async fn fetch_version(&self, deadline: Duration) -> Result<Version, Error> {
        let call = self.call("Version", deadline);
        let mut rpc = self.runtime.clone();
        let request = call.request(v1::VersionRequest {
            version: "0.1.0".to_owned(),
        });
        let answer = call.run(rpc.version(request)).await?;
        if answer.runtime_name.is_empty() {
            return Err(call.invalid_response("it gives no runtime name"));
        }
        Ok(Version {
            runtime_name: answer.runtime_name,
            runtime_version: answer.runtime_version,
            runtime_api_version: answer.runtime_api_version,
        })
    }

    async fn fetch_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<Option<v1::ContainerStatusResponse>, Error> {
        let call = self.call("ContainerStatus", CALL_TIMEOUT);
        let max_bytes = if verbose {
            MAX_VERBOSE_BYTES
        } else {
            MAX_RESPONSE_BYTES
        };
        let mut rpc = self.runtime.clone().max_decoding_message_size(max_bytes);
        let request = call.request(v1::ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose,
        });
        call.run_optional(rpc.container_status(request)).await
    }

    async fn fetch_image(
        &self,
        image: &str,
        verbose: bool,
    ) -> Result<Option<v1::ImageStatusResponse>, Error> {
        let call = self.call("ImageStatus", CALL_TIMEOUT);
        let max_bytes = if verbose {
            MAX_VERBOSE_BYTES
        } else {
            MAX_RESPONSE_BYTES
        };
        let mut rpc = self.images.clone().max_decoding_message_size(max_bytes);
        let request = call.request(v1::ImageStatusRequest {
            image: Some(convert::image_spec(image)),
            verbose,
        });
        call.run_optional(rpc.image_status(request)).await
    }

    async fn fetch_image_fs_info(&self, deadline: Duration) -> Result<v1::ImageFsInfoResponse, Error> {
        let call = self.call("ImageFsInfo", deadline);
        let mut rpc = self.images.clone();
        let request = call.request(v1::ImageFsInfoRequest {});
        call.run(rpc.image_fs_info(request)).await
    }

    fn call(&self, method: &'static str, deadline: Duration) -> Call<'_> {
        Call {
            socket: &self.socket,
            method,
            deadline,
        }
    }

    async fn pull(&self, request: &PullRequest) -> Result<String, Error> {
        let call = self.call("PullImage", request.timeout);
        let mut rpc = self.images.clone();
        let mut message = call.request(convert::pull_request(request));
        let traceparent = request.traceparent.as_deref().and_then(|text| text.parse().ok());
        if let Some(traceparent) = traceparent {
            message.metadata_mut().insert("traceparent", traceparent);
        }
        let answer = call
            .run(Box::pin(rpc.pull_image(message)))
            .await
            .map_err(|e| to_pull_error(&request.image, e))?;
        if answer.image_ref.is_empty() {
            return Err(call.invalid_response("it names no image"));
        }
        Ok(answer.image_ref)
    }
}

#[async_trait]
impl Runtime for CriClient {
    fn name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> &Path {
        &self.socket
    }

    async fn version(&self) -> Result<Version, Error> {
        self.fetch_version(CALL_TIMEOUT).await
    }

    async fn image_status(&self, image: &str) -> Result<Option<Image>, Error> {
        let answer = match self.fetch_image(image, true).await {
            Err(error) if is_too_long(&error) => self.fetch_image(image, false).await?,
            other => other?,
        };
        Ok(answer.and_then(|a| a.image.map(|image| convert::image(image, &a.info))))
    }

    async fn pull_image(&self, request: &PullRequest) -> Result<String, Error> {
        // Kept until the pull ends or is dropped: bytes are counted for this process's pulls in progress.
        let _guard = self.content.as_ref().map(|content| content.track(&request.image));
        let pinned_until = match &self.records {
            Some(records) => match records.pinned_until(&request.image).await {
                // What cannot be read at any time cannot be pinned either.
                Err(error) if !error.retryable() => None,
                // The pull would remove the pin.
                other => other?,
            },
            None => None,
        };
        let image = self.pull(request).await?;
        if let Some((records, until)) = self.records.clone().zip(pinned_until) {
            let name = request.image.clone();
            // In a task, because the caller's deadline may end this future before the pin is there again.
            let renewal = tokio::spawn(async move {
                if let Err(error) = records.pin(&name, until).await {
                    tracing::warn!(image = name, %error, "the image was pinned, and is no longer");
                }
            });
            // Only a panic ends it without a result.
            let _ = renewal.await;
        }
        Ok(image)
    }

    async fn pull_progress(&self, image: &str) -> Result<Option<DownloadProgress>, Error> {
        let Some(content) = &self.content else {
            return Ok(None);
        };
        match content.progress(image).await {
            // A runtime that reports itself as containerd and has no content store returns no bytes.
            Err(Error::Unimplemented { .. }) => Ok(None),
            other => other,
        }
    }

    async fn image_filesystem(&self) -> Result<Option<PathBuf>, Error> {
        let info = self.fetch_image_fs_info(CALL_TIMEOUT).await?;
        let mut usages = info.image_filesystems.into_iter();
        let mountpoint = usages.find_map(|usage| usage.fs_id).map(|id| id.mountpoint);
        Ok(mountpoint.filter(|path| !path.is_empty()).map(PathBuf::from))
    }

    async fn pin_image(&self, image: &str, until: Timestamp) -> Result<(), Error> {
        let Some(records) = &self.records else {
            return Err(Error::Unimplemented {
                socket: self.socket.clone(),
                method: "PinImage",
                message: format!("{} has no such call", self.name),
            });
        };
        records.pin(image, until).await
    }

    async fn unpin_ended_images(&self, now: Timestamp) -> Result<ImagePins, Error> {
        match &self.records {
            Some(records) => records.unpin_ended(now).await,
            None => Ok(ImagePins::default()),
        }
    }

    async fn list_containers(&self, pod_uid: &str) -> Result<Vec<Container>, Error> {
        let call = self.call("ListContainers", CALL_TIMEOUT);
        let mut rpc = self.runtime.clone();
        let filter = v1::ContainerFilter {
            label_selector: pod_selector(pod_uid),
            ..Default::default()
        };
        let request = call.request(v1::ListContainersRequest { filter: Some(filter) });
        let answer = call.run(rpc.list_containers(request)).await?;
        let mut list: Vec<Container> = answer.containers.into_iter().map(convert::container).collect();
        sort_newest_first(&mut list);
        Ok(list)
    }

    async fn container_status(&self, id: &str) -> Result<Option<ContainerStatus>, Error> {
        let answer = self.fetch_status(id, false).await?;
        Ok(answer.and_then(|a| a.status).map(convert::container_status))
    }

    async fn container_details(&self, id: &str) -> Result<Option<ContainerDetails>, Error> {
        let answer = match self.fetch_status(id, true).await {
            Err(error) if is_too_long(&error) => self.fetch_status(id, false).await?,
            other => other?,
        };
        Ok(answer.and_then(|a| Some(convert::container_details(a.status?, &a.info))))
    }

    async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), Error> {
        let call = self.call("StopContainer", grace.saturating_add(CALL_TIMEOUT));
        let mut rpc = self.runtime.clone();
        let request = call.request(v1::StopContainerRequest {
            container_id: id.to_owned(),
            timeout: convert::whole_seconds(grace.min(call::MAX_DEADLINE)),
        });
        call.run_optional(rpc.stop_container(request)).await.map(|_| ())
    }

    async fn exec_sync(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
        max_output: usize,
    ) -> Result<Option<ExecOutput>, Error> {
        let call = self.call("ExecSync", timeout.saturating_add(CALL_TIMEOUT));
        let max_bytes = max_output.saturating_add(EXEC_FIELDS);
        let mut rpc = self.runtime.clone().max_decoding_message_size(max_bytes);
        let request = call.request(v1::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.to_vec(),
            // In CRI, 0 means "no limit".
            timeout: convert::whole_seconds(timeout.min(call::MAX_DEADLINE)).max(1),
        });
        match call.run(rpc.exec_sync(request)).await {
            Ok(answer) => Ok(Some(ExecOutput {
                stdout: answer.stdout,
                stderr: answer.stderr,
                exit_code: answer.exit_code,
            })),
            Err(error) if is_too_long(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn pod_ips(&self, pod_uid: &str) -> Result<Vec<String>, Error> {
        self.fetch_pod_ips(pod_uid).await
    }
}

impl CriClient {
    async fn fetch_pod_ips(&self, pod_uid: &str) -> Result<Vec<String>, Error> {
        let call = self.call("ListPodSandbox", CALL_TIMEOUT);
        let mut rpc = self.runtime.clone();
        let ready = v1::PodSandboxStateValue {
            state: v1::PodSandboxState::SandboxReady.into(),
        };
        let filter = v1::PodSandboxFilter {
            state: Some(ready),
            label_selector: pod_selector(pod_uid),
            ..Default::default()
        };
        let request = call.request(v1::ListPodSandboxRequest { filter: Some(filter) });
        let answer = call.run(rpc.list_pod_sandbox(request)).await?;
        let Some(newest) = answer.items.into_iter().max_by_key(|s| s.created_at) else {
            return Ok(Vec::new());
        };
        let call = self.call("PodSandboxStatus", CALL_TIMEOUT);
        let request = call.request(v1::PodSandboxStatusRequest {
            pod_sandbox_id: newest.id,
            verbose: false,
        });
        let answer = call.run_optional(rpc.pod_sandbox_status(request)).await?;
        Ok(answer
            .and_then(|a| a.status)
            .and_then(|s| s.network)
            .map_or_else(Vec::new, convert::pod_ips))
    }
}

/// Sorts containers: of one name, the one that kubelet started last comes first.
fn sort_newest_first(list: &mut [Container]) {
    list.sort_by(|a, b| {
        // The node's clock may have been set back in between.
        (b.restart_count, b.created_at, &b.id).cmp(&(a.restart_count, a.created_at, &a.id))
    });
}

/// Whether the response was longer than the client reads.
fn is_too_long(error: &Error) -> bool {
    matches!(error, Error::InvalidResponse { why, .. } if why == call::RESPONSE_TOO_LONG)
}

/// Converts a refusal of PullImage. containerd 2 returns "not implemented" for image formats that it has dropped.
fn to_pull_error(image: &str, error: Error) -> Error {
    let (code, message) = match error {
        Error::Rejected { code, message, .. } => (code, message),
        Error::Unimplemented { message, .. } if message.contains("failed to pull") => {
            (tonic::Code::Unimplemented, message)
        }
        other => return other,
    };
    let cause = PullCause::classify(code, &message);
    Error::Pull {
        image: image.to_owned(),
        cause,
        message: convert::clean_pull_message(&message),
    }
}

fn pod_selector(uid: &str) -> std::collections::HashMap<String, String> {
    [(POD_UID_LABEL.to_owned(), uid.to_owned())].into()
}

/// A channel that connects on use, and again after the connection has broken.
fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connect = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The address only goes into `:authority`; the connector above ignores it.
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect)
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn container_with_most_restarts_is_newest() {
        let container = |id: &str, restart_count, second| Container {
            id: id.to_owned(),
            restart_count,
            created_at: Some(Timestamp::UNIX_EPOCH + SignedDuration::from_secs(second)),
            ..Container::default()
        };
        let mut list = vec![
            container("first", 0, 900),
            container("again", 1, 100),
            container("last", 1, 200),
        ];
        sort_newest_first(&mut list);
        let order: Vec<_> = list.iter().map(|container| container.id.as_str()).collect();
        assert_eq!(order, ["last", "again", "first"]);
    }
}
