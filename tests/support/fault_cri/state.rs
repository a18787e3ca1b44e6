//! State of the fault-injecting runtime.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1;
use tokio::sync::Notify;

use super::Fault;

/// Images, containers, faults and received calls.
#[derive(Debug)]
pub struct State {
    /// Runtime name in `Version` responses.
    pub runtime_name: String,
    /// Faults by method.
    pub faults: HashMap<String, Fault>,
    /// Calls by method.
    pub calls: HashMap<String, usize>,
    /// Calls in flight, and the maximum so far, by method.
    pub in_flight: HashMap<String, (usize, usize)>,
    /// Errors that PullImage returns for an image, before it succeeds.
    pub pull_failures: HashMap<String, VecDeque<(tonic::Code, String)>>,
    /// Duration of a pull.
    pub pull_delay: Duration,
    /// Images that require this user and password.
    pub credentials: HashMap<String, (String, String)>,
    /// Images on the node by the name that they were pulled under.
    pub images: BTreeMap<String, v1::Image>,
    /// Every received pull.
    pub pulls: Vec<v1::PullImageRequest>,
    /// Pulls in progress, and the maximum so far.
    pub active_pulls: usize,
    pub max_active_pulls: usize,
    /// Pulls that the client cancelled.
    pub cancelled_pulls: usize,
    /// Containers by ID.
    pub containers: BTreeMap<String, FakeContainer>,
    /// Address of each Pod, if they have a network of their own.
    pub pod_ip: Option<String>,
    /// Notified when a call begins or ends.
    pub changed: Arc<Notify>,
}

/// A container of the fault-injecting runtime.
#[derive(Debug, Clone, Default)]
pub struct FakeContainer {
    pub pod_uid: String,
    pub name: String,
    pub running: bool,
    pub created_at: i64,
    pub restart_count: u32,
    /// Kubelet's hash of the container's spec.
    pub hash: u64,
    /// Its environment, if verbose responses should contain it.
    pub env: Option<Vec<(String, String)>>,
    /// Outputs of commands run in it, in order; without an entry a command is echoed.
    pub exec_outputs: VecDeque<(i32, String)>,
    /// Grace period of the StopContainer that it received, in seconds.
    pub stop_grace_seconds: Option<i64>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            runtime_name: "containerd".to_owned(),
            faults: HashMap::new(),
            calls: HashMap::new(),
            in_flight: HashMap::new(),
            pull_failures: HashMap::new(),
            pull_delay: Duration::ZERO,
            credentials: HashMap::new(),
            images: BTreeMap::new(),
            pulls: Vec::new(),
            active_pulls: 0,
            max_active_pulls: 0,
            cancelled_pulls: 0,
            containers: BTreeMap::new(),
            pod_ip: None,
            changed: Arc::new(Notify::new()),
        }
    }
}

impl State {
    /// Puts an image on the node.
    pub fn add_image(&mut self, image: &str) {
        let id = format!("sha256:{:064x}", image.len());
        let (tags, digests) = if image.contains('@') {
            (vec![], vec![image.to_owned()])
        } else {
            (vec![image.to_owned()], vec![])
        };
        let entry = v1::Image {
            id,
            repo_tags: tags,
            repo_digests: digests,
            size: 1,
            ..Default::default()
        };
        self.images.insert(image.to_owned(), entry);
    }

    /// Result of a pull of `request`, after its duration.
    pub fn pull_result(
        &mut self,
        request: &v1::PullImageRequest,
    ) -> Result<v1::PullImageResponse, tonic::Status> {
        let image = request.image.clone().unwrap_or_default().image;
        if let Some((code, message)) = self.pull_failures.get_mut(&image).and_then(VecDeque::pop_front) {
            return Err(tonic::Status::new(code, message));
        }
        if let Some((user, password)) = self.credentials.get(&image) {
            let auth = request.auth.clone().unwrap_or_default();
            if (&auth.username, &auth.password) != (user, password) {
                let message = format!(
                    "failed to pull and unpack image \"{image}\": unexpected status: 401 Unauthorized"
                );
                return Err(tonic::Status::unknown(message));
            }
        }
        self.add_image(&image);
        Ok(v1::PullImageResponse {
            image_ref: self.images[&image].id.clone(),
        })
    }
}
