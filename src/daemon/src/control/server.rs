//! The service: lists and streams of what [`LiveState`] contains.

use std::pin::Pin;

use futures::Stream;
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::to_proto;
use super::v1::node_control_server::NodeControl;
use super::v1::{
    ListPullsRequest, ListPullsResponse, ListRecreatesRequest, ListRecreatesResponse, ListRestartsRequest,
    ListRestartsResponse, ListRuntimesRequest, ListRuntimesResponse,
};
use crate::live::LiveState;

pub(super) struct ControlService {
    live: LiveState,
    shutdown: CancellationToken,
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl ControlService {
    pub(super) fn new(live: LiveState, shutdown: CancellationToken) -> Self {
        Self { live, shutdown }
    }

    /// Sends the current value, then every new one, until shutdown.
    fn stream<S, T>(&self, source: &watch::Sender<S>, view: fn(S) -> T) -> Response<ResponseStream<T>>
    where
        S: Clone + Send + Sync + 'static,
        T: Send + 'static,
    {
        let changes = WatchStream::new(source.subscribe()).map(move |value| Ok(view(value)));
        let shutdown = self.shutdown.clone().cancelled_owned();
        Response::new(Box::pin(futures::StreamExt::take_until(changes, shutdown)))
    }
}

#[tonic::async_trait]
impl NodeControl for ControlService {
    type WatchPullsStream = ResponseStream<ListPullsResponse>;
    type WatchRecreatesStream = ResponseStream<ListRecreatesResponse>;
    type WatchRestartsStream = ResponseStream<ListRestartsResponse>;
    type WatchRuntimesStream = ResponseStream<ListRuntimesResponse>;

    async fn list_pulls(&self, _: Request<ListPullsRequest>) -> Result<Response<ListPullsResponse>, Status> {
        Ok(Response::new(to_proto::pulls(self.live.pulls.borrow().clone())))
    }

    async fn watch_pulls(
        &self,
        _: Request<ListPullsRequest>,
    ) -> Result<Response<Self::WatchPullsStream>, Status> {
        Ok(self.stream(&self.live.pulls, to_proto::pulls))
    }

    async fn list_recreates(
        &self,
        _: Request<ListRecreatesRequest>,
    ) -> Result<Response<ListRecreatesResponse>, Status> {
        Ok(Response::new(to_proto::recreates(
            self.live.recreates.borrow().clone(),
        )))
    }

    async fn watch_recreates(
        &self,
        _: Request<ListRecreatesRequest>,
    ) -> Result<Response<Self::WatchRecreatesStream>, Status> {
        Ok(self.stream(&self.live.recreates, to_proto::recreates))
    }

    async fn list_restarts(
        &self,
        _: Request<ListRestartsRequest>,
    ) -> Result<Response<ListRestartsResponse>, Status> {
        Ok(Response::new(to_proto::restarts(
            self.live.restarts.borrow().clone(),
        )))
    }

    async fn watch_restarts(
        &self,
        _: Request<ListRestartsRequest>,
    ) -> Result<Response<Self::WatchRestartsStream>, Status> {
        Ok(self.stream(&self.live.restarts, to_proto::restarts))
    }

    async fn list_runtimes(
        &self,
        _: Request<ListRuntimesRequest>,
    ) -> Result<Response<ListRuntimesResponse>, Status> {
        Ok(Response::new(to_proto::runtimes(
            self.live.runtimes.borrow().clone(),
        )))
    }

    async fn watch_runtimes(
        &self,
        _: Request<ListRuntimesRequest>,
    ) -> Result<Response<Self::WatchRuntimesStream>, Status> {
        Ok(self.stream(&self.live.runtimes, to_proto::runtimes))
    }
}
