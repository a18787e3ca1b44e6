//! How a container was created, as reported by real containerd.

use std::collections::HashMap;

use hyper_util::rt::TokioIo;
use k8s_cri::v1;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use kruise_cri::{ContainerState, Runtime as _};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::fixture::RuntimeFixture;

/// An image of one file: it has no program that could print the environment.
const PAUSE: &str = "registry.k8s.io/pause:3.10";

/// A client that can create containers, which ours cannot.
async fn runtime_client(fixture: &RuntimeFixture) -> RuntimeServiceClient<Channel> {
    let socket = fixture.runtime.socket();
    let connect = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    RuntimeServiceClient::new(endpoint.connect_with_connector(connect).await.unwrap())
}

fn sandbox_config() -> v1::PodSandboxConfig {
    let host_network = v1::NamespaceOption {
        network: v1::NamespaceMode::Node.into(),
        ..Default::default()
    };
    let security = v1::LinuxSandboxSecurityContext {
        namespace_options: Some(host_network),
        ..Default::default()
    };
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: "details".into(),
            uid: "details".into(),
            namespace: "default".into(),
            attempt: 0,
        }),
        linux: Some(v1::LinuxPodSandboxConfig {
            security_context: Some(security),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn container_config() -> v1::ContainerConfig {
    let pair = |key: &str, value: &str| v1::KeyValue {
        key: key.into(),
        value: value.into(),
    };
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: "main".into(),
            attempt: 0,
        }),
        image: Some(v1::ImageSpec {
            image: PAUSE.into(),
            ..Default::default()
        }),
        envs: vec![
            pair("EMPTY", ""),
            pair("LINES", "one\ntwo=2"),
            pair("A", "1"),
            pair("A", "2"),
        ],
        annotations: HashMap::from([("io.kubernetes.container.hash".to_owned(), "dfa5".to_owned())]),
        ..Default::default()
    }
}

/// Environment and annotations are available while the container runs and after it has exited.
pub async fn container_details_survive_exit(fixture: &RuntimeFixture) {
    fixture.pull(PAUSE).await.unwrap();
    let mut cri = runtime_client(fixture).await;
    let request = v1::RunPodSandboxRequest {
        config: Some(sandbox_config()),
        ..Default::default()
    };
    let pod_sandbox_id = cri
        .run_pod_sandbox(request)
        .await
        .unwrap()
        .into_inner()
        .pod_sandbox_id;
    let request = v1::CreateContainerRequest {
        pod_sandbox_id: pod_sandbox_id.clone(),
        config: Some(container_config()),
        sandbox_config: Some(sandbox_config()),
    };
    let id = cri
        .create_container(request)
        .await
        .unwrap()
        .into_inner()
        .container_id;
    let request = v1::StartContainerRequest {
        container_id: id.clone(),
    };
    cri.start_container(request).await.unwrap();
    for state in [ContainerState::Running, ContainerState::Exited] {
        if state == ContainerState::Exited {
            fixture
                .client
                .stop_container(&id, std::time::Duration::from_secs(1))
                .await
                .unwrap();
        }
        let details = fixture.client.container_details(&id).await.unwrap().unwrap();
        assert_eq!(details.status.state, state);
        assert_eq!(details.status.annotations["io.kubernetes.container.hash"], "dfa5");
        let env = details
            .environment
            .expect("containerd says what it was made with");
        let values = ["EMPTY", "LINES", "A", "B"].map(|name| env.get(name));
        assert_eq!(values, [Some(""), Some("one\ntwo=2"), Some("2"), None]);
    }
    cri.remove_pod_sandbox(v1::RemovePodSandboxRequest { pod_sandbox_id })
        .await
        .unwrap();
}
